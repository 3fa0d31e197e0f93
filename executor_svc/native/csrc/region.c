// The threads that regions run on. They are started when a region first wants them, and sleep between regions.
#define _GNU_SOURCE  // names of threads
#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "region.h"
#include "vec.h"

// How long a thread spins for the next region before it sleeps: calls of the library follow each other closely.
#define IDLE_LOOKS 1500

// Of `gate`: no thread may enter the region.
#define CLOSED (1 << 30)

// One region at a time; a second caller runs its region alone meanwhile.
static struct {
    Region region;
    atomic_uint number __attribute__((aligned(64)));  // of the regions so far; threads sleep on it
    atomic_int num_asleep;
    atomic_int gate __attribute__((aligned(64)));  // how many threads are in the region, besides the caller
    RegionFunction *function;
    void *argument;
    long num_workers;
    pthread_mutex_t in_use;
} pool = {.region.phase = 1, .gate = CLOSED, .in_use = PTHREAD_MUTEX_INITIALIZER};

static void run_member(int thread) {
    long num_phases = 0;
    begin_member();
    const Member member = {&pool.region, thread, pool.region.num_threads, &num_phases};
    pool.function(&member, pool.argument);
    end_member(&pool.region);
}

// Enter the region if it is open, and run it.
static void take_part(int thread) {
    int num_inside = atomic_load(&pool.gate);
    do {
        if (num_inside & CLOSED) return;
    } while (!atomic_compare_exchange_weak(&pool.gate, &num_inside, num_inside + 1));
    if (thread < pool.region.num_threads) run_member(thread);
    atomic_fetch_sub(&pool.gate, 1);
}

static void wait_for_region(unsigned number) {
    for (int i = 0; i < IDLE_LOOKS; i++, _mm_pause())
        if (atomic_load_explicit(&pool.number, memory_order_relaxed) != number) return;
    atomic_fetch_add(&pool.num_asleep, 1);
    while (atomic_load(&pool.number) == number)  // the kernel compares again before the thread sleeps
        syscall(SYS_futex, &pool.number, FUTEX_WAIT_PRIVATE, number, NULL, NULL, 0);
    atomic_fetch_sub(&pool.num_asleep, 1);
}

static void *run_worker(void *argument) {
    int thread = (int)(long)argument;
    for (;;) {
        unsigned number = atomic_load(&pool.number);
        take_part(thread);
        wait_for_region(number);
    }
    return NULL;
}

// A child process has none of the threads.
static void forget_workers(void) {
    pool.num_workers = 0;
    atomic_store(&pool.num_asleep, 0);
    atomic_store(&pool.gate, CLOSED);
    pool.in_use = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
}

// Have `num_workers` threads besides the caller, or as many as the system gives.
static void start_workers(long num_workers) {
    if (pool.num_workers >= num_workers) return;
    static bool is_known;
    if (!is_known) is_known = !pthread_atfork(NULL, NULL, forget_workers);
    sigset_t all, before;  // signals are for the threads of the program
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    for (pthread_t thread; pool.num_workers < num_workers; pool.num_workers++) {
        if (pthread_create(&thread, NULL, run_worker, (void *)(pool.num_workers + 1))) break;
        pthread_setname_np(thread, "octavo-team");
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void run_alone(RegionFunction *function, void *argument) {
    const Member member = {.num_threads = 1};
    function(&member, argument);
}

void run_region(Team *team, RegionFunction *function, void *argument) {
    if (team->num_threads == 1 || pthread_mutex_trylock(&pool.in_use)) {
        run_alone(function, argument);
        return;
    }
    open_team(team, &pool.region);
    long size = least(team->size, MOST_THREADS);
    start_workers(size - 1);
    pool.region.num_threads = (int)size;
    if (size == 1) {
        run_alone(function, argument);
    } else {
        pool.function = function;
        pool.argument = argument;
        atomic_store(&pool.gate, 0);
        atomic_fetch_add(&pool.number, 1);
        if (atomic_load(&pool.num_asleep))
            syscall(SYS_futex, &pool.number, FUTEX_WAKE_PRIVATE, (int)pool.num_workers, NULL, NULL, 0);
        run_member(0);
        Wait wait = {0};
        for (int inside = atomic_fetch_or(&pool.gate, CLOSED) & ~CLOSED; inside;) {
            for (int i = 0; i < 32 && inside; i++, _mm_pause()) inside = atomic_load(&pool.gate) & ~CLOSED;
            if (inside) take_turn(&wait);
        }
        close_team(&pool.region);
    }
    pthread_mutex_unlock(&pool.in_use);
}
