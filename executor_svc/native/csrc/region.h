// What team.c and region.c share: a region, as all of its threads see it.
#ifndef OCTAVO_REGION_H
#define OCTAVO_REGION_H

#include <stdatomic.h>

#include "team.h"

#define MOST_THREADS 256
// Grains of a phase. Those of a thread begin at a cache line.
#define MOST_GRAINS 4096
#define LINE_GRAINS 8
#define NUM_STATES (MOST_GRAINS + MOST_THREADS * 2 * LINE_GRAINS)

// State of a grain in phase p: 4 * p + one of these; less than 4 * p: no thread has taken it.
enum { TAKEN, CLAIMED, DONE };

// Phases are counted over all regions, from 1, so that earlier values in `states` mean nothing.
struct Region {
    atomic_ulong phase __attribute__((aligned(64)));  // the phase under way: all earlier ones are done
    atomic_ulong states[NUM_STATES] __attribute__((aligned(64)));
    // Of the region under way.
    Team *team __attribute__((aligned(64)));
    unsigned long first_phase;
    int num_threads;
    long began_ns;
    atomic_long worked_ns, lost_ns;  // sums over the threads, as in Team
};

// Before and after a region of several threads, and first and last in each thread.
void open_team(Team *team, Region *region);
void close_team(Region *region);
void begin_member(void);
void end_member(Region *region);

// A wait of a thread, in turns.
typedef struct {
    long began_ns, slept_ns;
} Wait;
// Between two looks at the awaited value: keep the core for a moment, or, after a long time, offer it to others.
void take_turn(Wait *wait);
void end_wait(const Wait *wait);

#endif
