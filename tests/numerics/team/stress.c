// Phases whose tasks count who does them, in a region whose threads are delayed on purpose.
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "team.h"

#define MOST_TASKS 5000  // more than a phase has grains

typedef struct {
    long num_phases, delay_us;
    unsigned seed;
    atomic_int done[2][MOST_TASKS];  // how often a task of this phase was done, and of the one before
    atomic_long num_faults, num_repeated, num_by_others;
} Stress;

static unsigned draw(unsigned seed, unsigned a, unsigned b) {
    unsigned x = seed * 2654435761u ^ a * 2246822519u ^ b * 3266489917u;
    x ^= x >> 15, x *= 2654435761u, x ^= x >> 13;
    return x;
}

static void delay(const Stress *stress, unsigned a, unsigned b) {
    if (stress->delay_us && draw(stress->seed, a, b) % 128 == 0)
        nanosleep(&(struct timespec){.tv_nsec = stress->delay_us * 1000}, NULL);
}

// Each phase looks at what the one before has left, then empties it for the one behind.
static void run(const Member *member, void *argument) {
    Stress *stress = argument;
    unsigned thread = (unsigned)member->thread;
    for (long number = 0; number < stress->num_phases; number++) {
        static const long sizes[] = {0, 1, 5, 3, 7, 12, 40, 64, MOST_TASKS};
        unsigned kind = draw(stress->seed, (unsigned)number, 0);
        long num_tasks = sizes[kind % 9];
        atomic_int *done = stress->done[number % 2], *before = stress->done[1 - number % 2];
        delay(stress, thread, (unsigned)number);
        if (number) {
            Phase checks = begin_phase(member, sizes[draw(stress->seed, (unsigned)number - 1, 0) % 9], ONCE);
            while (next_task(&checks))
                if (atomic_exchange(before + checks.task, 0) != 1) atomic_fetch_add(&stress->num_faults, 1);
        }
        Phase phase = begin_phase(member, num_tasks, kind & 16 ? REPEATABLE : ONCE);
        while (next_task(&phase)) {
            delay(stress, thread * 100000 + (unsigned)number, (unsigned)phase.task);
            if (!claim_task(&phase)) {
                atomic_fetch_add(&stress->num_repeated, 1);
                continue;
            }
            delay(stress, thread, (unsigned)(number + phase.task));
            atomic_fetch_add(done + phase.task, 1);
            if (thread) atomic_fetch_add(&stress->num_by_others, 1);
        }
    }
}

// Run regions; results: tasks of a phase that were not done once when it ended, tasks that were done in vain, and those
// that others than the caller did.
void stress_team(Team *team, long num_regions, long num_phases, long delay_us, unsigned seed, long *results) {
    Stress *stress = calloc(1, sizeof *stress);
    for (long i = 0; i < num_regions; i++) {
        memset(stress->done, 0, sizeof stress->done);
        stress->num_phases = num_phases;
        stress->delay_us = delay_us;
        stress->seed = seed + (unsigned)i;
        team->size = i ? 1 + draw(seed, 7, (unsigned)i) % team->num_threads : team->num_threads;
        run_region(team, run, stress);
    }
    results[0] = stress->num_faults, results[1] = stress->num_repeated, results[2] = stress->num_by_others;
    free(stress);
}
