// How threads share the tasks of a phase, and how many threads are worth it.
//
// A phase of one row takes some 10 us, less than it takes to wake a thread: threads that run side by side spin. Where
// other work wants the cores too, a thread is put off its core for milliseconds, some hundred phases long. The other
// threads do its tasks, and repeat the one that it was in the middle of. Only in a phase that has no tasks left they
// wait for it: they spin for a while, and then offer their cores to other work. A team that gets little done this way
// becomes smaller, for a time.
#define _POSIX_C_SOURCE 200809L  // the clocks
#include <immintrin.h>
#include <sched.h>
#include <stdlib.h>
#include <time.h>
#include <x86intrin.h>

#include "region.h"
#include "vec.h"

// How often a thread looks at the phase before it looks at the clock.
#define LOOKS 32
// How long a thread waits before it repeats another thread's task, in ticks of a clock of 2 to 4 GHz, and in lengths of
// its own last task: after that the other thread is probably off its core.
#define PATIENCE_TICKS 60000ul
#define PATIENCE_TASKS 2
// How long a thread spins before it offers its core to others.
#define SPIN_NS 100000l

// A thread that missed less of a region had a core: waking it takes time too.
#define LOST_NS 200000l
// Time of regions that is judged together: several of the turns that threads take on a core.
#define JUDGED_NS 50000000l
// How long a team stays small: at first, and at most.
#define LEAST_PAUSE_NS 100000000l
#define MOST_PAUSE_NS 800000000l

// Of this thread, in its region.
static _Thread_local long began_ns, began_cpu_ns;
static _Thread_local long spun_ns, yielded_ns;  // waited, on a core and without one

static long read_ns(clockid_t clock) {
    struct timespec now;
    clock_gettime(clock, &now);
    return now.tv_sec * 1000000000l + now.tv_nsec;
}

void begin_member(void) {
    spun_ns = yielded_ns = 0;
    began_ns = read_ns(CLOCK_MONOTONIC);
    began_cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID);
}

void end_member(Region *region) {
    long cpu_ns = read_ns(CLOCK_THREAD_CPUTIME_ID) - began_cpu_ns;
    long lost_ns = read_ns(CLOCK_MONOTONIC) - began_ns - cpu_ns - yielded_ns;
    atomic_fetch_add_explicit(&region->worked_ns, cpu_ns - spun_ns, memory_order_relaxed);
    if (lost_ns >= LOST_NS) atomic_fetch_add_explicit(&region->lost_ns, lost_ns, memory_order_relaxed);
}

void take_turn(Wait *wait) {
    long now_ns = read_ns(CLOCK_MONOTONIC);
    if (!wait->began_ns) wait->began_ns = now_ns;
    if (now_ns - wait->began_ns < SPIN_NS) return;
    long before_ns = read_ns(CLOCK_THREAD_CPUTIME_ID);
    sched_yield();
    wait->slept_ns += read_ns(CLOCK_MONOTONIC) - now_ns - (read_ns(CLOCK_THREAD_CPUTIME_ID) - before_ns);
}

void end_wait(const Wait *wait) {
    if (!wait->began_ns) return;
    spun_ns += read_ns(CLOCK_MONOTONIC) - wait->began_ns - wait->slept_ns;
    yielded_ns += wait->slept_ns;
}

// Choose the size of the team by what its regions were like, once there is enough of them.
//
// A team is too large if it lost time to other work, and if its threads worked for less than half of the time: half as
// many would do. A team stays smaller for a pause, which doubles each time that growing turns out to be wrong.
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

void open_team(Team *team, Region *region) {
    region->team = team;
    region->began_ns = read_ns(CLOCK_MONOTONIC);
    octavo_judge_team(team, region->began_ns);
    region->num_threads = (int)team->size;
    region->first_phase = atomic_load_explicit(&region->phase, memory_order_relaxed);
    atomic_store_explicit(&region->worked_ns, 0, memory_order_relaxed);
    atomic_store_explicit(&region->lost_ns, 0, memory_order_relaxed);
}

void close_team(Region *region) {
    Team *team = region->team;
    team->elapsed_ns += read_ns(CLOCK_MONOTONIC) - region->began_ns;
    team->worked_ns += region->worked_ns;
    team->lost_ns += region->lost_ns;
}

// The first grain of a range, and where the states of its grains are.
static long range_begin(const Phase *phase, long range) { return phase->num_grains * range / phase->member->num_threads; }
static atomic_ulong *states_of(const Phase *phase, long range) {
    long length = round_up(ceil_div(phase->num_grains, phase->member->num_threads), LINE_GRAINS);
    return phase->member->region->states + range * length;
}
static unsigned long state_in(const Phase *phase, unsigned long state) { return 4 * phase->number + state; }

static bool is_over(const Phase *phase) {
    return atomic_load_explicit(&phase->member->region->phase, memory_order_acquire) != phase->number;
}

Phase begin_phase(const Member *member, long num_tasks, Repetition repetition) {
    Phase phase = {.member = member, .num_tasks = num_tasks, .task = -1};
    if (member->num_threads == 1) {
        phase.end = phase.range_end = num_tasks;
        return phase;
    }
    phase.number = member->region->first_phase + (unsigned long)(*member->num_phases)++;
    // A late thread may have read a wrong number of tasks: then it finds now that the phase is over.
    atomic_thread_fence(memory_order_acquire);
    if (is_over(&phase)) phase.num_tasks = 0;
    phase.grain_tasks = most(1, ceil_div(phase.num_tasks, MOST_GRAINS));
    phase.num_grains = ceil_div(phase.num_tasks, phase.grain_tasks);
    phase.may_repeat = repetition == REPEATABLE && phase.grain_tasks == 1;
    phase.cursor = phase.begin = range_begin(&phase, member->thread);
    phase.limit = range_begin(&phase, member->thread + 1);
    phase.range_end = least(phase.limit * phase.grain_tasks, phase.num_tasks);
    return phase;
}

static void hold(Phase *phase, atomic_ulong *state, long grain) {
    phase->state = state;
    phase->task = grain * phase->grain_tasks;
    phase->end = least(phase->task + phase->grain_tasks, phase->num_tasks);
    phase->is_ours = !phase->may_repeat;
}

// Take a free grain: the first one of our own range, or the last one of another thread's.
static bool take_grain(Phase *phase) {
    int num_threads = phase->member->num_threads;
    unsigned long taken = state_in(phase, TAKEN);
    for (;;) {
        long range = (phase->member->thread + phase->turn) % num_threads;
        atomic_ulong *states = states_of(phase, range) - phase->begin;
        while (phase->cursor >= phase->begin && phase->cursor < phase->limit) {
            long grain = phase->cursor;
            unsigned long before = atomic_load_explicit(states + grain, memory_order_relaxed);
            phase->cursor += phase->turn ? -1 : 1;
            if (before >= taken || !atomic_compare_exchange_strong(states + grain, &before, taken)) continue;
            hold(phase, states + grain, grain);
            return true;
        }
        if (phase->turn == num_threads - 1) return false;
        range = (phase->member->thread + ++phase->turn) % num_threads;
        phase->begin = range_begin(phase, range);
        phase->limit = range_begin(phase, range + 1);
        phase->cursor = phase->limit - 1;
        phase->range_end = 0;
    }
}

// Find the first grain from `*grain` on with a state below `state`; NULL: there is none.
static atomic_ulong *find_grain(const Phase *phase, unsigned long state, long *grain) {
    for (long range = 0; range < phase->member->num_threads; range++) {
        long begin = range_begin(phase, range), end = range_begin(phase, range + 1);
        if (*grain >= end) continue;
        atomic_ulong *states = states_of(phase, range) - begin;
        for (; *grain < end; ++*grain)
            if (atomic_load_explicit(states + *grain, memory_order_acquire) < state_in(phase, state))
                return states + *grain;
    }
    return NULL;
}

// Take a task that another thread has had for too long, to repeat it; false: there is none.
static bool repeat_grain(Phase *phase, unsigned long began) {
    if (!phase->may_repeat || __rdtsc() - began < PATIENCE_TICKS + PATIENCE_TASKS * phase->took) return false;
    long grain = phase->num_done;
    atomic_ulong *state = find_grain(phase, CLAIMED, &grain);
    if (state) hold(phase, state, grain);
    return state;
}

// Wait until the phase is over, or for another thread's task that takes too long; false: the phase is over.
static bool wait_for_end(Phase *phase) {
    // Of threads that finish at the same time at least one sees that all have finished.
    atomic_thread_fence(memory_order_seq_cst);
    if (is_over(phase)) return false;
    if (!find_grain(phase, DONE, &phase->num_done)) {
        unsigned long number = phase->number;
        atomic_compare_exchange_strong(&phase->member->region->phase, &number, number + 1);
        return false;
    }
    unsigned long began = __rdtsc();
    bool is_repeating = false, has_ended = false;
    Wait wait = {0};
    for (;;) {
        for (int i = 0; i < LOOKS && !has_ended; i++, _mm_pause()) has_ended = is_over(phase);
        if (has_ended || (is_repeating = repeat_grain(phase, began))) break;
        take_turn(&wait);
    }
    end_wait(&wait);
    return is_repeating;
}

bool take_task(Phase *phase) {
    unsigned long now = __rdtsc();
    if (phase->state) {
        if (phase->is_ours) atomic_store_explicit(phase->state, state_in(phase, DONE), memory_order_release);
        phase->took = now - phase->began;
    }
    phase->began = now;
    return take_grain(phase) || wait_for_end(phase);
}

bool claim_repeatable(Phase *phase) {
    unsigned long taken = state_in(phase, TAKEN);
    phase->is_ours = atomic_compare_exchange_strong(phase->state, &taken, state_in(phase, CLAIMED));
    return phase->is_ours;
}

void *own_memory(OwnPart part, long num_bytes) {
    static _Thread_local struct {
        void *address;
        long size;
    } parts[NUM_PARTS];
    if (parts[part].size < num_bytes) {
        free(parts[part].address);
        parts[part].size = round_up(num_bytes + num_bytes / 4, 64);
        parts[part].address = aligned_alloc(64, (size_t)parts[part].size);
    }
    return parts[part].address;
}
