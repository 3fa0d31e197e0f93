// The threads of a parallel region: how many there are, and how they share its work.
//
// A region is a function that several threads run. Its work falls into phases, which all of them come to in the same
// order; a phase is a loop of tasks. A thread goes on to the next phase when all tasks of this one are done, by any
// thread. No thread is waited for: a thread that is woken late, or put off its core by other work, finds out later what
// is done, and meanwhile an idle thread repeats the task that it holds.
#ifndef OCTAVO_TEAM_H
#define OCTAVO_TEAM_H

#include <stdatomic.h>
#include <stdbool.h>

// How many threads the regions of a library have, and measurements of the last ones; see octavo_judge_team.
typedef struct {
    long num_threads;  // most
    long size;         // of the next region; 1 to num_threads
    long pause_ns;     // how long the team stays small when it shrinks again
    long grows_at_ns;  // when it grows, if it is small
    // Sums over the regions since size was judged last, and over all of their threads.
    long elapsed_ns;
    long worked_ns;  // on a core, without waiting for each other
    long lost_ns;    // ready to run, but without a core
} Team;

typedef struct Region Region;

// One thread of a region, as it sees itself.
typedef struct {
    Region *region;
    int thread, num_threads;
    long *num_phases;  // phases that it has come to
} Member;

typedef void RegionFunction(const Member *member, void *argument);

// Run `function` by the threads of a team. It is done when this returns; threads that came late may have found nothing left.
void run_region(Team *team, RegionFunction *function, void *argument);

// Whether two threads may do a task at the same time. Then it computes into memory of its own thread, and writes its
// result only if claim_task says so. A thread may go on with a task when all others are far ahead: it finds anything in
// what it reads, and must be able to.
typedef enum { ONCE, REPEATABLE } Repetition;

// A loop of tasks, as one thread sees it.
typedef struct {
    const Member *member;
    unsigned long number;
    long num_tasks;
    long task;                 // the current one
    long end;                  // of the tasks that it has taken
    bool may_repeat, is_ours;  // is_ours: no other thread writes the current task's result
    // Grains are tasks that are taken together. Each thread has a range of them.
    long grain_tasks, num_grains;
    long turn, begin, limit, cursor;  // the search for the next one: threads from our own on, in its range
    long range_end;                   // of the tasks in our own range
    long num_done;                    // known to be done, from the first grain on
    atomic_ulong *state;              // of the grain that it has; NULL: none
    unsigned long began, took;        // ticks: when it was taken, and the length of the one before
} Phase;

// Come to the next phase. Read what it depends on before.
Phase begin_phase(const Member *member, long num_tasks, Repetition repetition);

// The slow half of next_task.
bool take_task(Phase *phase);

// Make `task` the next task; false: all tasks of the phase are done, its results can be read.
//
// Each thread has a range of the tasks, side by side and in order, and then helps the others.
static inline bool next_task(Phase *phase) {
    if (++phase->task < phase->end) return true;
    return phase->member->num_threads > 1 && take_task(phase);
}

// Whether the caller is to write the result of the current task. Ask once, behind the computation.
bool claim_repeatable(Phase *phase);
static inline bool claim_task(Phase *phase) { return !phase->may_repeat || claim_repeatable(phase); }

// The task that this thread will probably have next; the current one if that is not known.
static inline long upcoming_task(const Phase *phase) {
    return phase->task + 1 < phase->range_end ? phase->task + 1 : phase->task;
}

// Memory of this thread alone, aligned to 64 bytes, uninitialised; valid until it asks for the same part again.
typedef enum { OWN_ROWS, OWN_CHOICE, OWN_GATHERED, OWN_ATTENTION, OWN_STATE, NUM_PARTS } OwnPart;
void *own_memory(OwnPart part, long num_bytes);

#endif
