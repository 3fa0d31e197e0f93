// Groups of codes on their way into panels.
#ifndef OCTAVO_PACK_H
#define OCTAVO_PACK_H

#include "blocks.h"

// Write a group of codes at the inputs from k of a row; false: the format of the matrix does not hold it exactly.
bool put_group(const Matrix *matrix, long row, long k, const BlockGroup *group);

#endif
