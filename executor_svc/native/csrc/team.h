// The threads of a parallel region: how many, how they share the tasks of a phase, and wait for each other at its end.
#ifndef OCTAVO_TEAM_H
#define OCTAVO_TEAM_H

#include <stdatomic.h>

// How many threads the regions of a library have, and what their last ones were like; see octavo_judge_team.
typedef struct {
    long num_threads;  // most
    long size;         // of the next region; 1 to num_threads
    long pause_ns;     // how long the team stays small when it shrinks again
    long grows_at_ns;  // when it grows, if it is small
    // Sums over the regions since size was judged last. Those of threads are sums over all of them.
    long elapsed_ns;
    long worked_ns;  // on a core, without waiting for each other
    long lost_ns;    // ready to run, but without a core
} Team;

// One region. Shared by its threads.
typedef struct {
    atomic_long taken __attribute__((aligned(64)));  // tasks of this phase, but for the first of each thread
    atomic_int arrived;
    atomic_int phase __attribute__((aligned(64)));
    atomic_long worked_ns, lost_ns;  // sums over the threads, as those of Team
    Team *team;
    long began_ns;
} Meeting;

// One thread of a region, as it sees itself.
typedef struct {
    Meeting *meeting;
    int thread, num_threads;
} Member;

// Before and behind a parallel region of team->size threads.
void open_meeting(Meeting *meeting, Team *team);
void close_meeting(Meeting *meeting);
// What each thread of it does first and last. All leave together.
Member join_meeting(Meeting *meeting);
void leave_meeting(const Member *member);

// The slow half of wait_for_all.
void wait_for_phase_end(Meeting *meeting, int phase);

// The first task of a thread is its own number. Each next one is taken when the thread is ready for it: a slow core
// does less. A phase shares the tasks of one loop.
static inline long next_task(const Member *member) {
    return member->num_threads + atomic_fetch_add_explicit(&member->meeting->taken, 1, memory_order_relaxed);
}

// End a phase. OpenMP's own barrier ends with a system call, which takes longer than many a phase of one row.
static inline void wait_for_all(const Member *member) {
    Meeting *meeting = member->meeting;
    int phase = atomic_load_explicit(&meeting->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) < member->num_threads - 1) {
        wait_for_phase_end(meeting, phase);
        return;
    }
    atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
    atomic_store_explicit(&meeting->taken, 0, memory_order_relaxed);
    atomic_store_explicit(&meeting->phase, phase + 1, memory_order_release);
}

// The part of `count` things that is this thread's, [begin, end).
static inline void share(const Member *member, long count, long *begin, long *end) {
    *begin = count * member->thread / member->num_threads;
    *end = count * (member->thread + 1) / member->num_threads;
}

#endif
