// grad^T x of bfloat16 matrices on processors with AMX: the gradient of a weight. oneDNN, which torch uses, takes 1.3
// to 1.7 times as long for these shapes and gives the same after rounding.
//
// Such a product sums over the rows of both matrices. The tile unit needs pairs of rows beside each other and one
// matrix transposed. So kChunk rows at a time are packed that way, into the second cache. Sums stay float32 to the end.

#pragma once

#include "../cpu.h"

#if defined(__x86_64__) && defined(__linux__) && __has_include(<amxbf16intrin.h>)
#include <cpuid.h>
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"  // of GCC 12 about its own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#include <immintrin.h>
#pragma GCC diagnostic pop
#include <sys/syscall.h>
#include <unistd.h>
#define UNROLLED _Pragma("GCC unroll 16")
#define WITH_AMX __attribute__((target("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl")))

namespace amx {

constexpr int64_t kChunk = 256;  // rows packed at once: the panels of both matrices must stay in the caches
constexpr int64_t kSide = 16, kTile = 512, kSteps = kChunk / 32;  // a tile: kSide rows of 32 bfloat16

// Whether the processor has it and the system lets this process use it.
inline bool available() {
  static const bool found = [] {
    unsigned a, b, c, d;
    constexpr unsigned kBf16 = 1u << 22, kTiles = 1u << 24, kVectors = 1u << 16 | 1u << 30 | 1u << 31;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    if (!(d & kBf16) || !(d & kTiles) || (b & kVectors) != kVectors) return false;
    constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return found;
}

inline int64_t up(int64_t n) { return (n + 31) / 32 * 32; }

// Swaps the axes of [16][16] words.
WITH_AMX inline void transpose(__m512i* v) {
  __m512i t[16];
  UNROLLED
  for (int i = 0; i < 8; ++i) {
    t[2 * i] = _mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]);
  }
  UNROLLED
  for (int i = 0; i < 16; i += 4) {
    UNROLLED
    for (int j = 0; j < 2; ++j) {
      v[i + 2 * j] = _mm512_unpacklo_epi64(t[i + j], t[i + j + 2]);
      v[i + 2 * j + 1] = _mm512_unpackhi_epi64(t[i + j], t[i + j + 2]);
    }
  }
  UNROLLED
  for (int i = 0; i < 4; ++i) {
    UNROLLED
    for (int j = 0; j < 16; j += 8) {
      t[j + i] = _mm512_shuffle_i32x4(v[j + i], v[j + 4 + i], 0x88);
      t[j + 4 + i] = _mm512_shuffle_i32x4(v[j + i], v[j + 4 + i], 0xdd);
    }
  }
  UNROLLED
  for (int i = 0; i < 8; ++i) {
    v[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
    v[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
  }
}

// Rows of x as tiles [columns / 16][kSteps][16 pairs of rows][16 columns][2], or [16 columns][16 pairs][2] if flipped.
// Missing rows and columns are 0.
WITH_AMX inline void pack(const uint16_t* x, int64_t width, int64_t rows, int64_t columns, bool flipped, uint16_t* to) {
  for (int64_t r = 0; r < rows; r += 32)
    for (int64_t c = 0; c < up(columns); c += kSide) {
      const int64_t n = std::clamp<int64_t>(columns - c, 0, kSide);
      const __mmask16 here = (1u << n) - 1;
      __m512i pairs[16];
      UNROLLED
      for (int p = 0; p < 16; ++p) {
        __m512i row[2];
        UNROLLED
        for (int i = 0; i < 2; ++i) {
          const int64_t at = r + 2 * p + i;
          const __m256i half = _mm256_maskz_loadu_epi16(at < rows ? here : 0, x + at * width + c);
          row[i] = _mm512_cvtepu16_epi32(half);
        }
        pairs[p] = _mm512_or_si512(row[0], _mm512_slli_epi32(row[1], 16));
      }
      if (flipped) transpose(pairs);
      uint16_t* tile = to + (c / kSide * kSteps + r / 32) * kTile;
      UNROLLED
      for (int p = 0; p < 16; ++p) _mm512_storeu_si512(tile + p * 32, pairs[p]);
    }
}

// Adds to sums [32, 32] the product of two panels: two columns of `steps` tiles each.
WITH_AMX inline void add_block(const uint16_t* a, const uint16_t* b, int64_t steps, float* sums, int64_t width) {
  const int64_t next = kSteps * kTile, bytes = width * 4;
  _tile_loadd(0, sums, bytes);
  _tile_loadd(1, sums + kSide, bytes);
  _tile_loadd(2, sums + kSide * width, bytes);
  _tile_loadd(3, sums + kSide * width + kSide, bytes);
  for (int64_t at = 0; at < steps * kTile; at += kTile) {
    _tile_loadd(4, a + at, 64);
    _tile_loadd(6, b + at, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, b + next + at, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, a + next + at, 64);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, bytes);
  _tile_stored(1, sums + kSide, bytes);
  _tile_stored(2, sums + kSide * width, bytes);
  _tile_stored(3, sums + kSide * width + kSide, bytes);
}

// Returns the bytes of scratch memory that `add_product` needs.
inline int64_t scratch_bytes(int64_t grad_columns, int64_t x_columns) {
  return (up(grad_columns) + up(x_columns)) * kChunk * 2;
}

// Adds the product of some columns of grad and some columns of x, summed over rows, to sums [up(grad's), up(x's)].
WITH_AMX inline void add_product(const uint16_t* grad, int64_t grad_width, int64_t grad_columns, const uint16_t* x,
                                 int64_t x_width, int64_t x_columns, int64_t rows, float* sums, void* scratch) {
  const int64_t a_columns = up(grad_columns), b_columns = up(x_columns);
  uint16_t *a = static_cast<uint16_t*>(scratch), *b = a + a_columns * kChunk;
  alignas(64) uint8_t config[64] = {1};  // palette 1; bytes a row from byte 16 as 16 bits, rows from byte 48
  for (int tile = 0; tile < 8; ++tile) config[16 + 2 * tile] = 64, config[48 + tile] = 16;
  _tile_loadconfig(config);
  for (int64_t r = 0; r < rows; r += kChunk) {
    const int64_t chunk = std::min(kChunk, rows - r);
    pack(grad + r * grad_width, grad_width, chunk, grad_columns, true, a);
    pack(x + r * x_width, x_width, chunk, x_columns, false, b);
    for (int64_t j = 0; j < b_columns; j += 32)
      for (int64_t i = 0; i < a_columns; i += 32)
        add_block(a + i * kChunk, b + j * kChunk, up(chunk) / 32, sums + i * b_columns + j, b_columns);
  }
  _tile_release();
}

}  // namespace amx

#else

namespace amx {
inline int64_t up(int64_t n) { return n; }
inline bool available() { return false; }
inline int64_t scratch_bytes(int64_t, int64_t) { return 0; }
inline void add_product(const uint16_t*, int64_t, int64_t, const uint16_t*, int64_t, int64_t, int64_t, float*, void*) {}
}  // namespace amx

#endif
