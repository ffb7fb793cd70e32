// Functions about the library as a whole: its instruction set, number of threads, and time per phase.

#include "simd/phases.h"
#include "simd/simd.h"
#include "simd/threads.h"

// Whether activations that are multiplied with bfloat16 weights are bfloat16 too.
TOKA_EXPORT int64_t toka_has_bfloat16_arithmetic() { return TOKA_BFLOAT16_DOT; }

// Sets the number of threads of all kernels; at least 1.
TOKA_EXPORT void toka_set_num_threads(int64_t num_threads) { Team::set_size(int(num_threads)); }

// Seconds per phase (phases.h) -> out [kNumPhases].
TOKA_EXPORT void toka_phase_seconds(double* out) { std::copy(phase_seconds, phase_seconds + kNumPhases, out); }
TOKA_EXPORT void toka_reset_phases() { std::fill(phase_seconds, phase_seconds + kNumPhases, 0.0); }
