// The soft cap of logits.
#ifndef OCTAVO_SOFT_CAP_H
#define OCTAVO_SOFT_CAP_H

// values[count] = cap * tanh(values / cap)
void cap_values(long count, float cap, float *values);

#endif
