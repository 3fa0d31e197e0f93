// Blocks of quantized weights as a GGUF file has them.
#ifndef OCTAVO_BLOCKS_H
#define OCTAVO_BLOCKS_H

#include "dense.h"

// GROUP weights of a row: weight = (code + offset) * scale + minimum, scale and minimum as float16 has them. A scale that
// float16 does not have is infinite.
typedef struct {
    int codes[GROUP];
    int offset;
    uint16_t scale, minimum;
} BlockGroup;

// Read the block of a type, which is a number of ggml's; false: the type is not known here.
bool read_block(long type, const uint8_t *block, BlockGroup *group);

// Bytes of a block; 0: the type is not known here.
long block_bytes(long type);

#endif
