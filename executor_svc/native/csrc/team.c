// How threads wait for each other, and how many of them are worth it.
//
// A phase of one row takes some 10 us, less than it takes to wake a thread: threads that run side by side spin. But where
// other work wants the cores too, a thread is put off its core for milliseconds, and all others wait for it, some
// hundred times a step. So a thread spins for a while only and then offers its core to others, and a team that gets
// little done this way becomes smaller, for a time. Nobody sleeps: a thread that is woken has to wait for a core again,
// all others for it, and so on; 32 sequences beside a scheduler and a client were a third slower that way.
#define _POSIX_C_SOURCE 200809L  // the clocks
#include <immintrin.h>
#include <omp.h>
#include <sched.h>
#include <stdbool.h>
#include <time.h>

#include "team.h"
#include "vec.h"

// Longer than a phase keeps a thread waiting as a rule.
#define SPIN_NS 100000l
// Looks at the phase between two looks at the clock.
#define LOOKS 32

// A thread that missed less of a region had a core: to be woken takes time too.
#define LOST_NS 200000l
// Time of regions that is judged together: several of the turns that threads take on a core.
#define JUDGED_NS 50000000l
// How long a team stays small: at first, and at most.
#define LEAST_PAUSE_NS 100000000l
#define MOST_PAUSE_NS 800000000l

// Of this thread, in its region.
static _Thread_local long began_cpu_ns;
static _Thread_local long spun_ns, yielded_ns;  // waited, on a core and without one

static long read_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000l + now.tv_nsec;
}

static bool is_over(Meeting *meeting, int phase) {
    return atomic_load_explicit(&meeting->phase, memory_order_acquire) != phase;
}

// Whether the phase ended while we looked.
static bool watch(Meeting *meeting, int phase) {
    for (int i = 0; i < LOOKS; i++, _mm_pause())
        if (is_over(meeting, phase)) return true;
    return false;
}

void wait_for_phase_end(Meeting *meeting, int phase) {
    if (watch(meeting, phase)) return;
    long began_ns = read_ns(CLOCK_MONOTONIC), now_ns = began_ns;
    bool has_ended = false;
    while (!has_ended && now_ns - began_ns < SPIN_NS) {
        has_ended = watch(meeting, phase);
        now_ns = read_ns(CLOCK_MONOTONIC);
    }
    spun_ns += now_ns - began_ns;
    if (has_ended) return;
    long began_cpu = read_ns(CLOCK_THREAD_CPUTIME_ID);
    while (!is_over(meeting, phase)) sched_yield();
    long cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID) - began_cpu;
    spun_ns += cpu_ns;
    yielded_ns += read_ns(CLOCK_MONOTONIC) - now_ns - cpu_ns;
}

// Choose the size of the team by what its regions were like, once there is enough of them.
//
// A team is too large if it lost time to other work, and if its threads worked for less than half of the time: half of
// them would do as well. Two threads beside one that never rests work for 0.4, beside short interruptions for 0.7 of it
// (2 cores). A team stays smaller for a pause, which doubles each time that growing turns out to be wrong.
void octavo_judge_team(Team *team, long now_ns) {
    if (team->size < team->num_threads && now_ns >= team->grows_at_ns) {
        team->size = least(team->num_threads, 2 * team->size);
    } else if (team->elapsed_ns < JUDGED_NS) {
        return;
    } else if (team->lost_ns > team->elapsed_ns / 8 && 2 * team->worked_ns < team->elapsed_ns * team->size) {
        team->pause_ns = team->pause_ns ? least(2 * team->pause_ns, MOST_PAUSE_NS) : LEAST_PAUSE_NS;
        team->grows_at_ns = now_ns + team->pause_ns;
        team->size = most(1, team->size / 2);
    } else if (team->size == team->num_threads) {
        team->pause_ns /= 2;
        if (team->pause_ns < LEAST_PAUSE_NS) team->pause_ns = 0;
    }
    team->elapsed_ns = team->worked_ns = team->lost_ns = 0;
}

void open_meeting(Meeting *meeting, Team *team) {
    *meeting = (Meeting){.team = team};
    if (team->num_threads == 1) return;
    meeting->began_ns = read_ns(CLOCK_MONOTONIC);
    octavo_judge_team(team, meeting->began_ns);
}

void close_meeting(Meeting *meeting) {
    Team *team = meeting->team;
    if (team->size == 1) return;
    team->elapsed_ns += read_ns(CLOCK_MONOTONIC) - meeting->began_ns;
    team->worked_ns += meeting->worked_ns;
    team->lost_ns += meeting->lost_ns;
}

Member join_meeting(Meeting *meeting) {
    if (meeting->team->size > 1) {
        spun_ns = yielded_ns = 0;
        began_cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID);
    }
    return (Member){meeting, omp_get_thread_num(), omp_get_num_threads()};
}

void leave_meeting(const Member *member) {
    Meeting *meeting = member->meeting;
    if (meeting->team->size == 1) return;
    wait_for_all(member);
    long cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID) - began_cpu_ns;
    long lost_ns = read_ns(CLOCK_MONOTONIC) - meeting->began_ns - cpu_ns - yielded_ns;
    atomic_fetch_add_explicit(&meeting->worked_ns, cpu_ns - spun_ns, memory_order_relaxed);
    if (lost_ns >= LOST_NS) atomic_fetch_add_explicit(&meeting->lost_ns, lost_ns, memory_order_relaxed);
}
