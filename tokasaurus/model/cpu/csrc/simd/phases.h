// Time per phase of forwards, in seconds since start-up ended. All calls come from one thread, which takes part in the
// work of each: the time it spends in a call is the call's duration.
#pragma once

#include <chrono>

// In the order of FORWARD_PHASES in messages/forward.py.
enum Phase { kGemms, kHeads, kPrefixAttention, kAttention, kSampling, kNumPhases };

inline double phase_seconds[kNumPhases] = {};

// Adds the time from here to the end of the block to a phase.
class PhaseTimer {
 public:
  explicit PhaseTimer(Phase phase) : phase_(phase), start_(std::chrono::steady_clock::now()) {}
  ~PhaseTimer() {
    phase_seconds[phase_] += std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }

 private:
  Phase phase_;
  std::chrono::steady_clock::time_point start_;
};
