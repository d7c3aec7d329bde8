// A small thread pool: one body run by a team of threads, with barriers inside it.
//
// Waiting spins briefly and then sleeps, so that the pool does not starve other pools (torch) on few cores. Callers are
// served one after the other. A forked child starts with a fresh pool, since threads do not survive fork.
#pragma once

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#define SAKIYOMI_HAS_FORK 1
#endif

#ifdef __linux__
#include <sched.h>
#endif

#include "openmp.hpp"
#include "profile.hpp"

namespace sakiyomi {

inline constexpr int kMaxThreads = 256;
// In time and not in turns: a pause takes ten nanoseconds on one processor and more than forty on another.
inline constexpr std::chrono::microseconds kBarrierSpin{12};  // longer ones cost more than they save where cores are shared
inline constexpr std::chrono::microseconds kIdleSpin{300};   // the time between two passes of a busy engine
inline constexpr std::chrono::microseconds kLongSleep{1000};  // a thread of the team that is waited for has no core
inline constexpr int kManyLongSleeps = 32;

inline void relax_cpu() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#else
    std::this_thread::yield();
#endif
}

// A counter that threads wait on.
class Gate {
   public:
    std::uint32_t value() const { return value_.load(std::memory_order_acquire); }

    void advance() {
        value_.fetch_add(1);
        if (num_sleepers_.load() == 0) return;
        std::lock_guard<std::mutex> lock(mutex_);
        awake_.notify_all();
    }

    // Until the value differs from `seen`. Returns whether the thread slept.
    bool wait_past(std::uint32_t seen, std::chrono::microseconds spin_for) {
        using Clock = std::chrono::steady_clock;
        constexpr int kTurns = 32;  // between two looks at the clock
        Clock::time_point end{};
        do {
            for (int turn = 0; turn < kTurns; ++turn) {
                if (value() != seen) return false;
                relax_cpu();
            }
            if (end == Clock::time_point{}) end = Clock::now() + spin_for;
        } while (Clock::now() < end);
        const Clock::time_point asleep = Clock::now();
        std::unique_lock<std::mutex> lock(mutex_);
        num_sleepers_.fetch_add(1);
        awake_.wait(lock, [&] { return value_.load() != seen; });
        num_sleepers_.fetch_sub(1);
        if (Clock::now() - asleep > kLongSleep) num_long_sleeps_.fetch_add(1, std::memory_order_relaxed);
        return true;
    }

    int num_long_sleeps() const { return num_long_sleeps_.load(std::memory_order_relaxed); }

   private:
    alignas(64) std::atomic<std::uint32_t> value_{0};
    std::atomic<int> num_sleepers_{0}, num_long_sleeps_{0};
    std::mutex mutex_;
    std::condition_variable awake_;
};

// Small work is not worth waking a thread.
inline int threads_for(int num_threads, std::int64_t num_operations) {
    const std::int64_t useful = num_operations / 32768 + 1;
    return useful < num_threads ? static_cast<int>(useful) : num_threads;
}

struct Range {
    std::int64_t begin, end;
};

// The share of `rank` when `count` items are split evenly into runs of `unit`.
inline Range split(std::int64_t count, int rank, int size, std::int64_t unit = 1) {
    const std::int64_t units = (count + unit - 1) / unit;
    const std::int64_t begin = units * rank / size * unit, end = units * (rank + 1) / size * unit;
    return {begin < count ? begin : count, end < count ? end : count};
}

// The cores that the threads of a team run on. A thread that sleeps is often woken on the core of the thread that wakes it,
// though others are free: behind a pause of a second Linux left both of two threads on one core for fifty milliseconds, in
// which a team is half as fast.
class Cores {
   public:
    // Called by each thread of the team where it may have been moved: when it starts, and when it has slept. One that shares a
    // core with another moves to a core that none of them has, if it is allowed to use such a one.
    void look(int rank, int size) {
#ifdef __linux__
        int core = sched_getcpu();
        if (is_shared(core, rank, size) && move_apart(rank, size)) core = sched_getcpu();
        if (cores_[rank].load(std::memory_order_relaxed) != core + 1) cores_[rank].store(core + 1, std::memory_order_relaxed);
#else
        (void)rank, (void)size;
#endif
    }

   private:
#ifdef __linux__
    // What a thread of the pool was told to keep to (nothing at first), so that it is not woken beside the others again, and
    // what it may use.
    struct Kept {
        cpu_set_t told, allowed;
    };

    bool is_shared(int core, int rank, int size) const {
        for (int other = 0; other < size; ++other)
            if (other != rank && cores_[other].load(std::memory_order_relaxed) == core + 1) return true;
        return false;
    }

    bool move_apart(int rank, int size) const {
        static thread_local Kept kept{};
        cpu_set_t allowed;
        if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return false;
        if (CPU_EQUAL(&allowed, &kept.told)) allowed = kept.allowed;
        cpu_set_t free = allowed;
        for (int other = 0; other < size; ++other) {
            const int core = cores_[other].load(std::memory_order_relaxed) - 1;
            if (other != rank && core >= 0 && core < CPU_SETSIZE) CPU_CLR(core, &free);
        }
        if (CPU_COUNT(&free) == 0 || sched_setaffinity(0, sizeof free, &free) != 0) return false;
        if (rank == 0)
            sched_setaffinity(0, sizeof allowed, &allowed);  // the caller's own thread
        else
            kept = {free, allowed};
        return true;
    }

    std::atomic<int> cores_[kMaxThreads] = {};  // and one; zero: not seen yet
#endif
};

// The threads that run one body together.
class Team {
   public:
    int size() const { return size_; }

    // work(item) for every item below `count`, by whichever thread has time, then a barrier. Each thread walks its own
    // share from the front, so that it streams memory; one that is done takes from the back of the others' shares.
    // Every thread of the team calls this, in the same order.
    template <class Work>
    void share(int rank, std::int64_t count, Work&& work) {
        share_then(rank, count, work, [] {});
    }

    // The same, with something that each thread does before it waits.
    template <class Work, class Last>
    void share_then(int rank, std::int64_t count, Work&& work, Last&& last) {
        if (size_ == 1) {
            for (std::int64_t item = 0; item < count; ++item) work(item);
            return;
        }
        const int size = size_;
        const std::int64_t run = count / kMostUnits + 1, num_units = (count + run - 1) / run;
        const std::uint64_t turn = ++shares_[rank].turn;
        for (int offset = 0; offset < size; ++offset) {
            const int owner = rank + offset < size ? rank + offset : rank + offset - size;
            for (std::int64_t unit; (unit = take(owner, size, turn, num_units, offset == 0)) >= 0;)
                for (std::int64_t item = unit * run; item < count && item < (unit + 1) * run; ++item) work(item);
        }
        last();
        barrier(rank);
    }

    // Everything written before it by any thread is seen after it by all.
    void barrier(int rank) {
        // Read before arriving: once the last thread has arrived, the next run may change the size.
        const int size = size_;
        if (size == 1) return;
        const Phase before = mark(Phase::kWait);
        const std::uint32_t phase = gate_.value();
        if (num_arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            num_arrived_.store(0, std::memory_order_relaxed);
            gate_.advance();
        } else {
            if (gate_.wait_past(phase, kBarrierSpin)) cores_.look(rank, size);
        }
        mark(before);
    }

   private:
    friend class Pool;
    static constexpr std::int64_t kMostUnits = (std::int64_t{1} << 20) - 1;

    // What is left of a thread's share: the turn that it belongs to (24 bits), the first item and the end (20 bits each).
    struct alignas(64) Share {
        std::atomic<std::uint64_t> left{0};
        std::uint64_t turn = 0;  // of the owner
    };

    // Takes one unit of an owner's share, or returns -1. A share of an earlier turn is one that nobody has touched yet.
    std::int64_t take(int owner, int size, std::uint64_t turn, std::int64_t count, bool from_front) {
        std::atomic<std::uint64_t>& left = shares_[owner].left;
        std::uint64_t seen = left.load(std::memory_order_relaxed);
        for (;;) {
            Range range = split(count, owner, size);
            if (seen >> 40 == turn)
                range = {static_cast<std::int64_t>(seen >> 20 & kMostUnits), static_cast<std::int64_t>(seen & kMostUnits)};
            if (range.begin >= range.end) return -1;
            const std::int64_t unit = from_front ? range.begin++ : --range.end;
            const std::uint64_t now = turn << 40 | static_cast<std::uint64_t>(range.begin) << 20 | static_cast<std::uint64_t>(range.end);
            if (left.compare_exchange_weak(seen, now, std::memory_order_relaxed)) return unit;
        }
    }

    void start(int size) {
        size_ = size;
        for (int rank = 0; rank < size; ++rank) {
            shares_[rank].left.store(0, std::memory_order_relaxed);
            shares_[rank].turn = 0;
        }
    }

    int size_ = 1;
    alignas(64) std::atomic<int> num_arrived_{0};
    Gate gate_;
    Cores cores_;
    Share shares_[kMaxThreads];
};

// Memory that a thread of the pool will soon read again. While it waits for work it fetches that, since what runs between (a
// whole pass of a model) leaves nothing of it in the caches. Fetching reads nothing: memory may be gone by then. After some
// runs in which nobody expected anything the thread stops.
class NextReads {
   public:
    static NextReads& of_thread() {
        static thread_local NextReads reads;
        return reads;
    }

    // From here on other memory is expected.
    void start() {
        pieces_.clear();
        room_ = kMostBytes;
        num_left_ = kMostRuns;
    }

    void add(const std::uint8_t* bytes, std::int64_t num_bytes) {
        pieces_.push_back({bytes, num_bytes < room_ ? num_bytes : room_});
        room_ -= pieces_.back().num_bytes;
    }

    // Ends as soon as there is work.
    template <class HasWork>
    void fetch(HasWork&& has_work) {
        if (num_left_ == 0) return;
        --num_left_;
        for (const Piece& piece : pieces_)
            for (std::int64_t at = 0; at < piece.num_bytes; at += kLine) {
                if (at % (64 * kLine) == 0 && has_work()) return;
                __builtin_prefetch(piece.bytes + at, 0, 2);
            }
    }

   private:
    static constexpr int kMostRuns = 16;                             // of the pool: a few passes
    static constexpr std::int64_t kMostBytes = std::int64_t{4} << 20;  // no core has more of a cache for itself
    static constexpr std::int64_t kLine = 64;

    struct Piece {
        const std::uint8_t* bytes;
        std::int64_t num_bytes;
    };

    std::vector<Piece> pieces_;
    std::int64_t room_ = 0;
    int num_left_ = 0;
};

class Pool {
   public:
    static Pool& instance() {
        Pool* pool = current().load();
        if (pool != nullptr) return *pool;
        forget_in_children();
        Pool* fresh = new Pool();  // never destroyed: its threads may outlive static destructors
        if (current().compare_exchange_strong(pool, fresh)) return *fresh;
        delete fresh;
        return *pool;
    }

    // Exclusive use of the pool, with scratch memory that stays allocated. Do not hold the GIL while waiting for it.
    class Lease {
       public:
        explicit Lease(int num_threads) : pool_(instance()), lock_(pool_.mutex_), num_threads_(num_threads) {}

        std::byte* scratch(std::size_t num_bytes) { return pool_.scratch(num_bytes); }

        // body(team, rank) on every thread of the team; it must not throw.
        template <class Body>
        void run(Body&& body) {
            pool_.run(num_threads_, body);
        }

       private:
        Pool& pool_;
        std::lock_guard<std::mutex> lock_;
        int num_threads_;
    };

   private:
    struct Worker {
        Gate start;
    };

    struct ScratchDeleter {
        void operator()(std::byte* bytes) const { ::operator delete(bytes, std::align_val_t(64)); }
    };

    template <class Body>
    void run(int num_threads, Body& body) {
        start_workers(num_threads - 1);
        call_ = [](void* target, Team& team, int rank) { (*static_cast<Body*>(target))(team, rank); };
        target_ = const_cast<void*>(static_cast<const void*>(&body));
        team_.start(num_threads);
        team_.cores_.look(0, num_threads);
        for (int i = 0; i < num_threads - 1; ++i) workers_[i]->start.advance();
        // A library may have switched this thread to flushing subnormals; results must not depend on the thread.
        std::fenv_t environment;
        std::fegetenv(&environment);
        std::fesetenv(FE_DFL_ENV);
        const ProfiledRank profiled(0);
        call_(target_, team_, 0);
        team_.barrier(0);
        std::fesetenv(&environment);
        if (team_.gate_.num_long_sleeps() >= next_word_) give_openmp_a_word(num_threads);
    }

    // Threads of the team often had no core. A runtime that is told once need not be told again.
    void give_openmp_a_word(int num_threads) {
        next_word_ = tell_openmp(num_threads) ? std::numeric_limits<int>::max() : team_.gate_.num_long_sleeps() + kManyLongSleeps;
    }

    void start_workers(int count) {
        while (static_cast<int>(workers_.size()) < count) {
            const int rank = static_cast<int>(workers_.size()) + 1;
            workers_.push_back(std::make_unique<Worker>());
            Worker* worker = workers_.back().get();
            try {
                std::thread([this, worker, rank] { serve(*worker, rank); }).detach();
            } catch (...) {
                workers_.pop_back();
                throw;
            }
        }
    }

    void serve(Worker& worker, int rank) {
        std::fesetenv(FE_DFL_ENV);
        for (std::uint32_t seen = 0;;) {
            NextReads::of_thread().fetch([&] { return worker.start.value() != seen; });
            worker.start.wait_past(seen, kIdleSpin);
            ++seen;
            team_.cores_.look(rank, team_.size());
            const ProfiledRank profiled(rank);
            call_(target_, team_, rank);
            team_.barrier(rank);
        }
    }

    std::byte* scratch(std::size_t num_bytes) {
        if (num_bytes > scratch_bytes_) {
            scratch_.reset();
            scratch_bytes_ = 0;
            scratch_.reset(static_cast<std::byte*>(::operator new(num_bytes, std::align_val_t(64))));
            scratch_bytes_ = num_bytes;
        }
        return scratch_.get();
    }

    static std::atomic<Pool*>& current() {
        static std::atomic<Pool*> pool{nullptr};
        return pool;
    }

    static void forget_in_children() {
#ifdef SAKIYOMI_HAS_FORK
        static std::atomic<bool> registered{false};
        if (!registered.exchange(true)) pthread_atfork(nullptr, nullptr, [] { current().store(nullptr); });
#endif
    }

    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> workers_;
    void (*call_)(void*, Team&, int) = nullptr;
    void* target_ = nullptr;
    Team team_;
    int next_word_ = kManyLongSleeps;  // long sleeps until then
    std::unique_ptr<std::byte, ScratchDeleter> scratch_;
    std::size_t scratch_bytes_ = 0;
};

}  // namespace sakiyomi
