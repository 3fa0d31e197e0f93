// The threads of a parallel region: how they share the tasks of a phase, and wait for each other at its end.
#ifndef OCTAVO_TEAM_H
#define OCTAVO_TEAM_H

#include <immintrin.h>
#include <sched.h>
#include <stdatomic.h>

// Rounds of waiting before a thread offers its core to others: some 50 us, several times what a phase takes.
#define WAIT_ROUNDS 1000

// Shared by the threads; all of it 0 when the region begins.
typedef struct {
    atomic_long taken __attribute__((aligned(64)));  // tasks of this phase, but for the first of each thread
    atomic_int arrived;
    atomic_int phase __attribute__((aligned(64)));
} Meeting;

// One thread of a region, as it sees itself.
typedef struct {
    Meeting *meeting;
    int thread, num_threads;
} Member;

// The first task of a thread is its own number. Each next one is taken when the thread is ready for it: a slow core
// does less. A phase shares the tasks of one loop.
static inline long next_task(const Member *member) {
    return member->num_threads + atomic_fetch_add_explicit(&member->meeting->taken, 1, memory_order_relaxed);
}

// End a phase. OpenMP's own barrier ends with a system call, which takes longer than many a phase of one row.
static inline void wait_for_all(const Member *member) {
    Meeting *meeting = member->meeting;
    int phase = atomic_load_explicit(&meeting->phase, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&meeting->arrived, 1, memory_order_acq_rel) == member->num_threads - 1) {
        atomic_store_explicit(&meeting->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->taken, 0, memory_order_relaxed);
        atomic_store_explicit(&meeting->phase, phase + 1, memory_order_release);
        return;
    }
    for (int rounds = 0; atomic_load_explicit(&meeting->phase, memory_order_acquire) == phase; rounds++)
        if (rounds < WAIT_ROUNDS)
            _mm_pause();
        else
            sched_yield();
}

// The part of `count` things that is this thread's, [begin, end).
static inline void share(const Member *member, long count, long *begin, long *end) {
    *begin = count * member->thread / member->num_threads;
    *end = count * (member->thread + 1) / member->num_threads;
}

#endif
