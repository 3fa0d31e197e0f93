// The rotary embedding.
#ifndef OCTAVO_ROTATION_H
#define OCTAVO_ROTATION_H

// factor times cos and sin [2 * half] of the angles position * frequencies[half], the sines of the first half with a
// minus; the angles are rounded to float32, as models are trained.
void turn_by_position(long position, const float *frequencies, long half, float factor, float *cos, float *sin);

#endif
