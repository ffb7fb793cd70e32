// AMX: eight registers of 16 rows of 64 bytes, called tiles, and products of tiles. cpu_features.cpp asks the operating
// system for permission to use them.
#pragma once

#include "simd/simd.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__)
#define TOKA_AMX 1
#else
#define TOKA_AMX 0
#endif

#if TOKA_AMX

constexpr int kAmxRows = 16, kAmxRowBytes = 64;

// The shapes of the tiles, while it exists. They are not kept for longer, since oneDNN sets them too.
//
// Tiles 0 to 3 are the product of tiles 4 and 5, one below the other, with tiles 6 and 7, side by side.
class AmxShapes {
 public:
  AmxShapes() = default;
  AmxShapes(const AmxShapes&) = delete;
  ~AmxShapes() {
    if (config_.palette != 0) _tile_release();
  }

  // num_rows: of tiles 4 and 5 together, at most 2 * kAmxRows; depth_bytes: of their rows. It takes as long as ten
  // products of tiles, unless the shapes are already these.
  void set(int num_rows, int depth_bytes) {
    const int first = num_rows < kAmxRows ? num_rows : kAmxRows;
    if (config_.rows[4] == first && config_.rows[5] == num_rows - first && config_.row_bytes[4] == depth_bytes) return;
    config_ = {};
    config_.palette = 1;
    const int rows[] = {first, first, num_rows - first, num_rows - first};
    for (int tile = 0; tile < 4; ++tile) set(tile, rows[tile], kAmxRowBytes);
    set(4, first, depth_bytes);
    set(5, num_rows - first, depth_bytes);
    set(6, depth_bytes / 4, kAmxRowBytes);
    set(7, depth_bytes / 4, kAmxRowBytes);
    asm volatile("" : : "m"(config_) : "memory");  // GCC 12 takes it that only the first eight bytes are read
    _tile_loadconfig(&config_);
  }

 private:
  struct alignas(64) Config {
    uint8_t palette = 0, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  };

  void set(int tile, int rows, int row_bytes) {
    config_.rows[tile] = uint8_t(rows);
    config_.row_bytes[tile] = uint16_t(rows == 0 ? 0 : row_bytes);
  }

  Config config_;
};

// GCC's tile loads do not say that they read memory.
static TOKA_INLINE void finish_stores() { asm volatile("" ::: "memory"); }

#endif
