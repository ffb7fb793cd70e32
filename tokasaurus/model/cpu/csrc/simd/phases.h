// Where the time of forwards goes, summed since start-up ended. Calls come from one thread, which works along in
// each of them: its clock is the time that the call took.
#pragma once

#include <chrono>

// Of which FORWARD_PHASES of messages/forward.py has the names.
enum Phase { kProducts, kHeads, kPrefixAttention, kAttention, kSampling, kNumPhases };

inline double phase_seconds[kNumPhases] = {};

// Counts the time from here to the end of the block.
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
