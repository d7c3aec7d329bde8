// Where the time of the kernels goes. Each thread notes the phase that it is in while a benchmark asks for it; a mark
// then costs one reading of the clock, and otherwise one test of a pointer.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>

namespace sakiyomi {

enum class Phase { kOther, kNorm, kQkv, kRotate, kAttention, kOutput, kGateUp, kDown, kHead, kWait, kCount };

inline constexpr const char* kPhaseNames[] = {"other",  "norm",    "qkv",  "rotate", "attention",
                                              "output", "gate_up", "down", "head",   "wait"};
static_assert(sizeof(kPhaseNames) / sizeof(kPhaseNames[0]) == static_cast<std::size_t>(Phase::kCount));

class Timeline {
   public:
    void start() {
        phase_ = Phase::kOther;
        since_ = now();
    }

    Phase enter(Phase phase) {
        const std::int64_t at = now();
        spent_[static_cast<int>(phase_)].fetch_add(at - since_, std::memory_order_relaxed);
        since_ = at;
        const Phase before = phase_;
        phase_ = phase;
        return before;
    }

    double seconds(Phase phase) const { return 1e-9 * static_cast<double>(spent_[static_cast<int>(phase)].load()); }

    void clear() {
        for (auto& spent : spent_) spent.store(0);
    }

   private:
    static std::int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
            .count();
    }

    std::atomic<std::int64_t> spent_[static_cast<int>(Phase::kCount)] = {};
    std::int64_t since_ = 0;
    Phase phase_ = Phase::kOther;
};

struct Profile {
    static constexpr int kMaxRanks = 256;
    std::atomic<bool> is_on{false};
    Timeline ranks[kMaxRanks];

    static Profile& instance() {
        static Profile profile;
        return profile;
    }
};

inline Timeline*& current_timeline() {
    static thread_local Timeline* timeline = nullptr;
    return timeline;
}

// From here on this thread is in `phase`. Returns the phase that it was in.
inline Phase mark(Phase phase) {
    Timeline* timeline = current_timeline();
    return timeline == nullptr ? Phase::kOther : timeline->enter(phase);
}

// While it lives, the thread's time counts for a rank of a team.
class ProfiledRank {
   public:
    explicit ProfiledRank(int rank) {
        Profile& profile = Profile::instance();
        if (!profile.is_on.load(std::memory_order_relaxed)) return;
        current_timeline() = &profile.ranks[rank];
        current_timeline()->start();
    }
    ~ProfiledRank() {
        mark(Phase::kOther);
        current_timeline() = nullptr;
    }
    ProfiledRank(const ProfiledRank&) = delete;
    ProfiledRank& operator=(const ProfiledRank&) = delete;
};

}  // namespace sakiyomi
