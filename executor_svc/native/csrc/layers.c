// All layers of a step in one parallel region; see octavo_layers.

#include "layers.h"

// What comes before an attention, and the attention.
typedef struct {
    const Segment *segment;
    const Step *step;
    float *keys, *values;  // of the layer's cache
} Layer;

static long segment_bytes(const Layer *layers, long num_layers, long num_rows) {
    long bytes = 0;
    for (long i = 0; i < num_layers; i++)
        bytes = most(bytes, octavo_segment_scratch_bytes(layers[i].segment, num_rows));
    return round_up(bytes, 64);
}

long octavo_layers_scratch_bytes(const Layer *layers, long num_layers, long num_rows, int num_threads) {
    long bytes = 0;
    for (long i = 0; i < num_layers; i++)
        bytes = most(bytes, octavo_attention_scratch_bytes(layers[i].step, num_threads));
    return segment_bytes(layers, num_layers, num_rows) + bytes;
}

// For each layer octavo_segment and octavo_attention, without starting threads and returning in between.
//
// residual [num_rows][hidden_size]; qkv [num_rows][outputs of a projection] is scratch; attended [num_rows][outputs of
// an attention] is the result, of the last layer; memory has octavo_layers_scratch_bytes(...), aligned to 64 bytes.
void octavo_layers(const Layer *layers, long num_layers, long num_rows, float *residual, float *qkv, float *attended,
                   char *memory, Team *team) {
    float *attention_memory = (float *)(memory + segment_bytes(layers, num_layers, num_rows));
    Meeting meeting;
    open_meeting(&meeting, team);
#pragma omp parallel num_threads(team->size)
    {
        const Member member = join_meeting(&meeting);
        for (const Layer *layer = layers; layer < layers + num_layers; layer++) {
            run_segment(layer->segment, num_rows, attended, residual, qkv, memory, &member);
            wait_for_all(&member);
            run_attention(layer->step, qkv, layer->keys, layer->values, attended, attention_memory, &member);
            wait_for_all(&member);
        }
        leave_meeting(&member);
    }
    close_meeting(&meeting);
}
