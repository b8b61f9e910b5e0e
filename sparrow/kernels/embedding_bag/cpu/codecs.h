// How each row format becomes lanes of fp32, and back: kernels/formats/ holds the definitions. Included by loops.h, for
// each kind of processor; nothing of the standard library is used here either.
//
// To add a format: a `Format` (loop_types.h), a row of `known_formats` (arguments.cpp), a reader and its case in
// FOR_FORMAT, and its cases in `decode` and `encode`.
//
// Work is done on LANES lanes at a time. The compiler converts number by number where a conversion skips a width.

template <int W>
struct LanesOf {
  typedef int32_t ints __attribute__((vector_size(W * 4)));
  typedef uint32_t unsigneds __attribute__((vector_size(W * 4)));
  typedef uint16_t halves __attribute__((vector_size(W * 2)));
  typedef uint8_t bytes __attribute__((vector_size(W)));
};
template <>
struct LanesOf<1> {
  typedef int32_t ints;
  typedef uint32_t unsigneds;
  typedef uint16_t halves;
  typedef uint8_t bytes;
};
template <int W>
using I = typename LanesOf<W>::ints;
template <int W>
using U = typename LanesOf<W>::unsigneds;
template <int W>
using H = typename LanesOf<W>::halves;
template <int W>
using B = typename LanesOf<W>::bytes;

template <class To, class From>
INLINE To bits_as(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <class T>
INLINE T load_as(const void* from) {
  T v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <class T>
INLINE void store_as(void* to, const T& v) {
  __builtin_memcpy(to, &v, sizeof v);
}

template <class To, int W, class From>
INLINE To converted(const From& from) {
  if constexpr (W == 1) return static_cast<To>(from);
  else return __builtin_convertvector(from, To);
}

template <int W>
INLINE I<W> widened(const H<W>& h) {
#if LANES >= 8
  if constexpr (W == 8) return bits_as<I<W>>(_mm256_cvtepu16_epi32(bits_as<__m128i>(h)));
#endif
#if LANES == 16
  if constexpr (W == 16) return bits_as<I<W>>(_mm512_cvtepu16_epi32(bits_as<__m256i>(h)));
#endif
  return converted<I<W>, W>(h);
}

template <int W>
INLINE I<W> widened(const B<W>& b) {
#if LANES >= 8
  if constexpr (W == 8) return bits_as<I<W>>(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bits_as<int64_t>(b))));
#endif
#if LANES == 16
  if constexpr (W == 16) return bits_as<I<W>>(_mm512_cvtepu8_epi32(bits_as<__m128i>(b)));
#endif
  return converted<I<W>, W>(converted<H<W>, W>(b));
}

// Of numbers from 0 to 65535.
template <int W>
INLINE H<W> halves_of(const I<W>& i) {
#if LANES >= 8
  if constexpr (W == 8) {
    const __m256i all = bits_as<__m256i>(i);
    return bits_as<H<W>>(_mm_packus_epi32(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
  }
#endif
#if LANES == 16
  if constexpr (W == 16) return bits_as<H<W>>(_mm512_cvtepi32_epi16(bits_as<__m512i>(i)));
#endif
  return converted<H<W>, W>(i);
}

// Of numbers from 0 to 255.
template <int W>
INLINE B<W> bytes_of(const I<W>& i) {
#if LANES >= 8
  if constexpr (W == 8) {
    const __m128i all = bits_as<__m128i>(halves_of<W>(i));
    return bits_as<B<W>>(_mm_cvtsi128_si64(_mm_packus_epi16(all, all)));
  }
#endif
#if LANES == 16
  if constexpr (W == 16) return bits_as<B<W>>(_mm512_cvtepi32_epi8(bits_as<__m512i>(i)));
#endif
  return converted<B<W>, W>(converted<H<W>, W>(i));
}

// Whether any lane is set, or not known.
template <int W>
INLINE bool some(const I<W>& mask) {
#if LANES >= 8
  if constexpr (W == 8) return _mm256_movemask_ps(bits_as<__m256>(mask));
#endif
#if LANES == 16
  if constexpr (W == 16) return _mm512_movepi32_mask(bits_as<__m512i>(mask));
#endif
  return true;
}

// -- decoding --------------------------------------------------------------------------------------------------------

template <int W>
INLINE V<W> from_bf16(const H<W>& h) {
  return bits_as<V<W>>(I<W>(widened<W>(h) << 16));
}

template <int W>
INLINE V<W> from_fp16(const H<W>& h) {
#if LANES >= 8
  if constexpr (W == 1) return _cvtsh_ss(h);
  if constexpr (W == 8) return bits_as<V<W>>(_mm256_cvtph_ps(bits_as<__m128i>(h)));
#endif
#if LANES == 16
  if constexpr (W == 16) return bits_as<V<W>>(_mm512_cvtph_ps(bits_as<__m256i>(h)));
#endif
  const I<W> wide = widened<W>(h);
  const I<W> size = (wide & 0x7fff) << 13, exponent = size & 0x0f800000;
  const I<W> normal = size + ((127 - 15) << 23);
  const I<W> infinite = normal + ((255 - 31 - (127 - 15)) << 23);  // infinities and NaN
  // a subnormal lacks the leading one: put it there, and take it away as a float
  const V<W> subnormal = bits_as<V<W>>(I<W>(size + ((127 - 14) << 23))) - 0x1p-14f;
  const I<W> made = exponent == 0x0f800000 ? infinite : (exponent == 0 ? bits_as<I<W>>(subnormal) : normal);
  return bits_as<V<W>>(I<W>(made | ((wide & 0x8000) << 16)));
}

// A reader of a row gives its lanes from a column on, LANES at most.
struct Fp32 {
  static constexpr bool is_fp32 = true;
  const uint8_t* row;
  INLINE Fp32(const uint8_t* row, int64_t) : row(row) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    return load_as<V<W>>(row + at * 4);
  }
};

struct Fp16 {
  static constexpr bool is_fp32 = false, is_long = false;
  const uint8_t* row;
  INLINE Fp16(const uint8_t* row, int64_t) : row(row) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    return from_fp16<W>(load_as<H<W>>(row + at * 2));
  }
};

struct Bf16 {
  static constexpr bool is_fp32 = false, is_long = false;
  const uint8_t* row;
  INLINE Bf16(const uint8_t* row, int64_t) : row(row) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    return from_bf16<W>(load_as<H<W>>(row + at * 2));
  }
};

struct Int8 {
  static constexpr bool is_fp32 = false, is_long = false;
  const uint8_t* row;
  const float scale, bias;
  INLINE Int8(const uint8_t* row, int64_t dim)
      : row(row), scale(load_as<float>(row + dim)), bias(load_as<float>(row + dim + 4)) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    return converted<V<W>, W>(widened<W>(load_as<B<W>>(row + at))) * scale + bias;
  }
};

// W codes of four bits from a column on, the low half of a byte first.
template <int W>
INLINE I<W> four_bits(const uint8_t* row, int64_t at) {
  const uint8_t* const from = row + at / 2;
  if constexpr (W == 1) {
    return at % 2 ? from[0] >> 4 : from[0] & 15;
  } else {
#if LANES >= 8
    // a byte in each eight, and its high half in the upper four of them
    if constexpr (W == 8) {
      if (at % 2 == 0) {
        const __m256i pairs = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load_as<int32_t>(from)));
        return bits_as<I<W>>(pairs | pairs << 28) & 15;
      }
    }
#endif
#if LANES == 16
    if constexpr (W == 16) {
      if (at % 2 == 0) {
        const __m512i pairs = _mm512_cvtepu8_epi64(_mm_cvtsi64_si128(load_as<int64_t>(from)));
        return bits_as<I<W>>(pairs | pairs << 28) & 15;
      }
    }
#endif
    // W codes are W / 2 bytes; those from an odd column on end within the byte after them
    uint64_t packed = 0;
    __builtin_memcpy(&packed, from, W / 2);
    if (at % 2) packed = packed >> 4 | static_cast<uint64_t>(from[W / 2]) << (W * 4 - 4);
    static constexpr uint32_t shift[16] = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    static constexpr int32_t in_low[16] = {-1, -1, -1, -1, -1, -1, -1, -1};
    const U<W> low = U<W>{} + static_cast<uint32_t>(packed), high = U<W>{} + static_cast<uint32_t>(packed >> 32);
    const U<W> words = W <= 8 ? low : load_as<I<W>>(in_low) ? low : high;
    return bits_as<I<W>>(U<W>(words >> load_as<U<W>>(shift) & 15u));
  }
}

struct Int4 {
  static constexpr bool is_fp32 = false, is_long = false;
  const uint8_t* row;
  const float scale, bias;
  INLINE Int4(const uint8_t* row, int64_t dim)
      : row(row),
        scale(from_fp16<1>(load_as<uint16_t>(row + (dim + 1) / 2))),
        bias(from_fp16<1>(load_as<uint16_t>(row + (dim + 1) / 2 + 2))) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    return converted<V<W>, W>(four_bits<W>(row, at)) * scale + bias;
  }
};

// An element of numerics/elements.py, as a row of MX codes has it. complement: negative codes are two's complements,
// and all numbers are whole. most: the code of the largest number.
template <int bits_, int mantissa_, int bias_, int32_t most_, bool complement_ = false>
struct Element {
  static constexpr int bits = bits_, mantissa = mantissa_, bias = bias_;
  static constexpr int32_t most = most_;
  static constexpr bool complement = complement_;
  static constexpr int largest_exponent = (most >> mantissa) - bias;
  static constexpr float unit = static_cast<float>(1ll << (bias + mantissa - 1));  // as many small steps are 1
  static constexpr float largest = static_cast<float>((most & ((1 << mantissa) - 1)) | 1 << mantissa) / unit *
                                   static_cast<float>(1 << ((most >> mantissa) - 1));
};

// W codes of an MX row from a column on. After the codes come the bytes of the scales.
template <int bits, int W>
INLINE I<W> codes_at(const uint8_t* row, int64_t at) {
  if constexpr (bits == 8) {
    return widened<W>(load_as<B<W>>(row + at));
  } else if constexpr (bits == 4) {
    return four_bits<W>(row, at);
  } else {
    static_assert(bits == 6);
    const uint8_t* const from = row + at * 6 / 8;
    const uint32_t skip = at * 6 % 8;
    if constexpr (W == 1) return (from[0] | from[1] << 8) >> skip & 63;
    // four codes are three bytes: wherever they begin, a word of four bytes holds them
    static constexpr uint32_t shift[16] = {0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18, 0, 6, 12, 18};
    uint32_t words[W];
    for (int i = 0; i < W; ++i) words[i] = load_as<uint32_t>(from + i / 4 * 3);
    return bits_as<I<W>>(U<W>(load_as<U<W>>(words) >> (load_as<U<W>>(shift) + skip) & 63u));
  }
}

// The scale of a block, 2 to the power of its byte - 127; 255 says that the block is not a number.
INLINE float scale_of(int32_t byte) { return bits_as<float>(byte << 23 | (byte == 0 || byte == 255 ? 0x00400000 : 0)); }

template <class E_>
struct Mx {
  static constexpr bool is_fp32 = false, is_long = true;
  using E = E_;
  const uint8_t *row, *scales;
  INLINE Mx(const uint8_t* row, int64_t dim) : row(row), scales(row + (dim * E::bits + 7) / 8) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    const int64_t block = at / kBlock, last = (at + W - 1) / kBlock;
    V<W> scale = V<W>{} + scale_of(scales[block]);
    if constexpr (W > 1) {
      static constexpr int32_t lane[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      if (last != block) {
        const int32_t first = static_cast<int32_t>(last * kBlock - at);
        scale = load_as<I<W>>(lane) < first ? scale : V<W>{} + scale_of(scales[last]);
      }
    }
    return number<W>(at) * scale;
  }
  template <int W>
  INLINE V<W> number(int64_t at) const {
    const I<W> code = codes_at<E::bits, W>(row, at);
    if constexpr (E::complement) return converted<V<W>, W>(I<W>((code << 24) >> 24)) * (1 / E::unit);
    const I<W> sign = (code >> (E::bits - 1)) << 31;
    const I<W> size = (code & ((1 << (E::bits - 1)) - 1)) << (23 - E::mantissa);
    const I<W> normal = size + ((127 - E::bias) << 23);
    // a subnormal lacks the leading one: put it there, and take it away as a float
    const V<W> subnormal = bits_as<V<W>>(I<W>(size + ((128 - E::bias) << 23))) - bits_as<float>((128 - E::bias) << 23);
    return bits_as<V<W>>(I<W>((size < (1 << 23) ? bits_as<I<W>>(subnormal) : normal) | sign));
  }
};
using Mxint8 = Mx<Element<8, 6, 1, 127, true>>;
using Mxfp8 = Mx<Element<8, 3, 7, 126>>;
using Mxfp6 = Mx<Element<6, 3, 1, 31>>;
using Mxfp4 = Mx<Element<4, 1, 1, 7>>;

// Whether a row is of fp32 among others: see `Places`.
INLINE bool is_frame(const uint8_t* row) { return reinterpret_cast<uintptr_t>(row) & kFrame; }

// Rows of which some are frames.
template <class Other>
struct Mixed {
  const bool is_fp32;
  const uint8_t* row;
  const int64_t dim;
  INLINE Mixed(const uint8_t* row, int64_t dim) : is_fp32(is_frame(row)), row(address_of(row)), dim(dim) {}
  template <int W>
  INLINE V<W> at(int64_t at) const {
    return is_fp32 ? Fp32(row, dim).at<W>(at) : Other(row, dim).template at<W>(at);
  }
};

template <int W>
struct Lanes {
  static constexpr int width = W;
};

// W lanes of a reader.
template <int W, class Reader>
INLINE V<W> values(const Reader& reader, int64_t at) {
  if constexpr (W > LANES) return {values<W / 2>(reader, at), values<W / 2>(reader, at + W / 2)};
  else return reader.template at<W>(at);
}

// Calls f(lanes, at) for all columns of a row, the last lanes shifted back where they would pass its end.
template <int W, class F>
INLINE void each_of(int64_t dim, const F& f) {
  for (int64_t at = 0; at + W <= dim; at += W) f(Lanes<W>{}, at);
  if (W > 1 && dim % W) f(Lanes<W>{}, dim - W);
}

template <class F>
INLINE void each(int64_t dim, const F& f) {
  if (dim >= LANES) return each_of<LANES>(dim, f);
  if constexpr (LANES > 8)
    if (dim >= 8) return each_of<8>(dim, f);
  if constexpr (LANES > 4)
    if (dim >= 4) return each_of<4>(dim, f);
  each_of<1>(dim, f);
}

template <class Reader>
void decode_by(const uint8_t* row, int64_t dim, float* to) {
  const Reader reader(row, dim);
  each(dim, [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    store<W>(to + at, reader.template at<W>(at));
  });
}

using Decoder = void (*)(const uint8_t* row, int64_t dim, float* to);

Decoder decoder_of(Format format) {
  switch (format) {
    case kFp32: return decode_by<Fp32>;
    case kFp16: return decode_by<Fp16>;
    case kBf16:
    case kSplitBf16: return decode_by<Bf16>;
    case kInt8: return decode_by<Int8>;
    case kInt4: return decode_by<Int4>;
    case kMxint8: return decode_by<Mxint8>;
    case kMxfp8: return decode_by<Mxfp8>;
    case kMxfp6: return decode_by<Mxfp6>;
    case kMxfp4: return decode_by<Mxfp4>;
  }
  return nullptr;
}

// A row as its rule begins with it.
void decode(const Level& level, int64_t row, int64_t dim, float* to) {
  const uint8_t* const from = level.row(row);
  if (level.format != kSplitBf16) return decoder_of(level.format)(from, dim, to);
  const uint8_t* const low = level.low + row * dim * 2;
  each(dim, [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    const I<W> high = widened<W>(load_as<H<W>>(from + at * 2)) << 16;
    store<W>(to + at, bits_as<V<W>>(I<W>(high | widened<W>(load_as<H<W>>(low + at * 2)))));
  });
}

// -- encoding --------------------------------------------------------------------------------------------------------

INLINE uint64_t mixed(uint64_t x) {  // splitmix64: core/mixing.py
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

// The random numbers of a row's field: `noise` of numerics/rounding.py.
struct Noise {
  bool on;  // else to nearest
  uint32_t low, high;
  int64_t column;  // the first one
  INLINE Noise() : on(false), low(0), high(0), column(0) {}
  INLINE Noise(bool on, const Rounding& r, int64_t field, int64_t row, int64_t column) : on(on), column(column) {
    const uint64_t key = mixed(static_cast<uint64_t>(r.row + row) +
                               mixed((static_cast<uint64_t>(r.n) * 16 + field) ^ static_cast<uint64_t>(r.key)));
    low = static_cast<uint32_t>(key);
    high = static_cast<uint32_t>(key >> 32);
  }
  template <int W>
  INLINE U<W> at(int64_t from) const {
    constexpr uint32_t G = 0x9E3779B9;
    static constexpr uint32_t times[16] = {0,     1 * G, 2 * G,  3 * G,  4 * G,  5 * G,  6 * G,  7 * G,
                                           8 * G, 9 * G, 10 * G, 11 * G, 12 * G, 13 * G, 14 * G, 15 * G};
    U<W> x = load_as<U<W>>(times) + (static_cast<uint32_t>(column + from) * G + low);
    x = (x ^ x >> 16) * 0x21F0AAADu;
    x = x ^ high;
    x = (x ^ x >> 15) * 0x735A2D97u;
    return x ^ x >> 15;
  }
};

template <int W>
INLINE I<W> truncated(const V<W>& x) {
  return converted<I<W>, W>(x);
}

// A whole number near x, 0 <= x < 2^31: below or above, by `noise`.
template <int W>
INLINE I<W> whole(const V<W>& x, const U<W>& noise) {
  const I<W> below = truncated<W>(x);
  const V<W> rest = x - converted<V<W>, W>(below);
  const I<W> up = bits_as<I<W>>(U<W>(noise >> 1)) < truncated<W>(rest * 0x1p31f) ? below + 1 : below;
  return up;
}

// The same to nearest, halves to the even one, for 0 <= x <= 2^22.
template <int W>
INLINE I<W> nearest(const V<W>& x) {
  return bits_as<I<W>>(V<W>(x + 0x1.8p23f)) - bits_as<int32_t>(0x1.8p23f);
}

template <int W>
INLINE H<W> to_bf16(const V<W>& x, const Noise& noise, int64_t at) {
  const I<W> bits = bits_as<I<W>>(x), size = bits & 0x7fffffff;
  I<W> made;
  if (noise.on) {
    const I<W> finite = size < 0x7f7f0000 ? size : I<W>{} + 0x7f7f0000;
    made = finite + bits_as<I<W>>(U<W>(noise.template at<W>(at) >> 16));
  } else {
    made = size + 0x7fff + ((size >> 16) & 1);
  }
  made = size < 0x7f800000 ? made : size == 0x7f800000 ? size : (size | 0x00400000);  // NaN stays NaN
  return halves_of<W>(bits_as<I<W>>(U<W>(bits_as<U<W>>(I<W>(made | (bits & (-0x7fffffff - 1)))) >> 16)));
}

template <int W>
INLINE H<W> nearest_fp16(const V<W>& x) {
#if LANES >= 8
  if constexpr (W == 1) return _cvtss_sh(x, 0);
  if constexpr (W == 8) return bits_as<H<W>>(_mm256_cvtps_ph(bits_as<__m256>(x), 0));
#endif
#if LANES == 16
  if constexpr (W == 16) return bits_as<H<W>>(_mm512_cvtps_ph(bits_as<__m512>(x), 0));
#endif
  constexpr int32_t kOne = (127 - 15) << 23, kLeast = (127 - 14) << 23;  // 2^-14
  const I<W> bits = bits_as<I<W>>(x), size = bits & 0x7fffffff;
  const I<W> normal = (size + 0xfff + ((size >> 13) & 1) - kOne) >> 13;
  const I<W> small = nearest<W>(bits_as<V<W>>(size < kLeast ? size : I<W>{}) * 0x1p24f);
  I<W> made = size < kLeast ? small : normal > 0x7c00 ? I<W>{} + 0x7c00 : normal;
  made = size > 0x7f800000 ? I<W>{} + 0x7e00 : size == 0x7f800000 ? I<W>{} + 0x7c00 : made;
  return halves_of<W>(I<W>(made | ((bits >> 16) & 0x8000)));
}

template <int W>
INLINE H<W> to_fp16(const V<W>& x, const Noise& noise, int64_t at) {
  if (!noise.on) return nearest_fp16<W>(x);
  constexpr int32_t kLeast = (127 - 14) << 23, kMost = 0x477fe000;  // 2^-14 and 65504
  const I<W> bits = bits_as<I<W>>(x), size = bits & 0x7fffffff;
  const U<W> random = noise.template at<W>(at);
  // a float that fp16 has: it has 13 bits fewer, and below 2^-14 steps of 2^-24
  I<W> made = ((size < kMost ? size : I<W>{} + kMost) + bits_as<I<W>>(U<W>(random >> 19))) & ~0x1fff;
  const I<W> is_small = size < kLeast;
  if (some<W>(is_small)) {
    const I<W> steps = whole<W>(bits_as<V<W>>(is_small ? size : I<W>{}) * 0x1p24f, random);
    made = is_small ? bits_as<I<W>>(V<W>(converted<V<W>, W>(steps) * 0x1p-24f)) : made;
  }
  made = size < 0x7f800000 ? made : size;
  return nearest_fp16<W>(bits_as<V<W>>(I<W>(made | (bits & (-0x7fffffff - 1)))));
}

// The least and the largest number of a row; zeros are positive.
INLINE void ends(const float* row, int64_t dim, float& low, float& high) {
  const auto by = [&](auto lanes) __attribute__((always_inline)) {
    constexpr int W = decltype(lanes)::width;
    V<W> least = load<W>(row), most = least;
    I<W> nan{};  // the bits of one, if there is one: no comparison is true of it, so it would be passed over
    each_of<W>(dim, [&](auto, int64_t at) {
      const V<W> v = load<W>(row + at);
      least = v < least ? v : least;
      most = v > most ? v : most;
      nan = v == v ? nan : I<W>{} + 0x7fc00000;
    });
    const float none = sum_of<W>(bits_as<V<W>>(nan));  // 0, or NaN
    low = folded<W>(least, [](const auto& a, const auto& b) { return a < b ? a : b; }) + none;
    high = folded<W>(most, [](const auto& a, const auto& b) { return a > b ? a : b; }) + none;
  };
  dim >= LANES ? by(Lanes<LANES>{}) : by(Lanes<1>{});
}

INLINE uint16_t half_of(float x) { return to_fp16<1>(x, Noise(), 0); }

void encode_int8(const float* from, int64_t dim, uint8_t* to, const Noise& noise) {
  float low, high;
  ends(from, dim, low, high);
  const float range = high - low, scale = range / 255.0f, inverse = 255.0f / (range + 1e-8f);
  const float step = scale > 0 ? scale : 1.0f;
  each(dim, [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    const V<W> x = load<W>(from + at) - low;
    I<W> codes;
    if (noise.on) {
      const V<W> steps = x / step;
      codes = whole<W>(steps < 255.0f ? steps : V<W>{} + 255.0f, noise.template at<W>(at));
    } else {
      codes = nearest<W>(x * inverse);
    }
    store_as(to + at, bytes_of<W>(codes > 255 ? I<W>{} + 255 : codes));
  });
  store_as(to + dim, scale);
  store_as(to + dim + 4, low);
}

// Two codes of four bits a byte, the first one low.
INLINE void store_pairs(uint8_t* to, const I<LANES>& codes) {
  typedef uint64_t Pairs __attribute__((vector_size(LANES * 4)));
  Pairs pairs = bits_as<Pairs>(codes);
  pairs |= pairs >> 28;  // in the low byte of each
#if LANES == 16
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm512_cvtepi64_epi8(bits_as<__m512i>(pairs)));
#else
  for (int p = 0; p < LANES / 2; ++p) to[p] = static_cast<uint8_t>(pairs[p]);
#endif
}

// The largest fp16 that is not above x.
INLINE uint16_t below(float x) {
#if LANES >= 8
  return _cvtss_sh(x, _MM_FROUND_TO_NEG_INF);
#else
  const uint16_t near = half_of(x);
  if (!(from_fp16<1>(near) > x)) return near;
  return near == 0 || near == 0x8000 ? 0x8001 : near & 0x8000 ? near + 1 : near - 1;
#endif
}

void encode_int4(const float* from, int64_t dim, uint8_t* to, const Noise& noise, float* scratch) {
  float low, high;
  ends(from, dim, low, high);
  const uint16_t bias = noise.on ? below(low) : half_of(low);
  const float begin = from_fp16<1>(bias), range = high - begin;
  uint16_t scale = half_of((range == 0 ? 15.0f : range) / 15.0f);
  if (noise.on) {
    // up until all are within the codes; the second step is looked at beside the first, not after it, to be faster
    const bool cut = begin + 15.0f * from_fp16<1>(scale) < high, both = begin + 15.0f * from_fp16<1>(scale + 1) < high;
    scale += cut + (cut & both);
  } else if (!(from_fp16<1>(scale) != 0) || 1.0f / from_fp16<1>(scale) > __FLT_MAX__) {
    scale = 0x3c00;  // 1
  }
  const float step = from_fp16<1>(scale), inverse = 1.0f / step;
  const auto codes_at = [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    const V<W> x = load<W>(from + at) - begin, steps = noise.on ? x / step : x * inverse;
    const V<W> least = steps > 0.0f ? steps : V<W>{};  // NaN, of a row beyond fp16, becomes 0
    const V<W> most = least < 15.0f ? least : V<W>{} + 15.0f;
    return noise.on ? whole<W>(most, noise.template at<W>(at)) : nearest<W>(most);
  };
  const int64_t pairs = (dim + 1) / 2;
  if (dim % 2 == 0 && dim >= LANES) {
    each_of<LANES>(dim, [&](auto lanes, int64_t at) { store_pairs(to + at / 2, codes_at(lanes, at)); });
  } else {
    uint8_t* const codes = reinterpret_cast<uint8_t*>(scratch);
    each(dim,
         [&](auto lanes, int64_t at) { store_as(codes + at, bytes_of<decltype(lanes)::width>(codes_at(lanes, at))); });
    codes[dim] = 0;
    for (int64_t p = 0; p < pairs; ++p) to[p] = static_cast<uint8_t>(codes[2 * p] | codes[2 * p + 1] << 4);
  }
  store_as(to + pairs, scale);
  store_as(to + pairs + 2, bias);
}

// The bits of the largest magnitude of some numbers, NaN if one is.
INLINE int32_t largest_of(const float* from, int64_t count) {
  const auto by = [&](auto lanes) __attribute__((always_inline)) {
    constexpr int W = decltype(lanes)::width;
    const auto larger = [](const auto& a, const auto& b) {
      constexpr int N = sizeof a / 4;
      const I<N> x = bits_as<I<N>>(a), y = bits_as<I<N>>(b);
      return bits_as<V<N>>(I<N>(x > y ? x : y));
    };
    V<W> most{};
    each_of<W>(count, [&](auto, int64_t at) {
      most = larger(most, bits_as<V<W>>(I<W>(load_as<I<W>>(from + at) & 0x7fffffff)));
    });
    return bits_as<int32_t>(folded<W>(most, larger));
  };
  return count >= LANES ? by(Lanes<LANES>{}) : by(Lanes<1>{});
}

// Eight codes of a byte each as eight of so many bits, in the low bits.
template <int bits>
INLINE uint64_t squeezed(uint64_t w) {
  constexpr uint64_t one = 0x00ff00ff00ff00ff, two = 0x0000ffff0000ffff, four = 0x00000000ffffffff;
  w = (w & one) | (w & ~one) >> (8 - bits);
  w = (w & two) | (w & ~two) >> (16 - 2 * bits);
  return (w & four) | (w & ~four) >> (32 - 4 * bits);
}

// The codes of a row are made a byte each, and then packed.
template <class Row>
void encode_mx(const Level& level, const float* from, int64_t dim, uint8_t* to, const Noise& noise, float* scratch) {
  using E = typename Row::E;
  constexpr int32_t top = 127 - E::largest_exponent;  // under a larger one, decoded numbers would be infinite
  const int64_t bytes = (dim * E::bits + 7) / 8;
  uint8_t* const codes = E::bits == 8 ? to : reinterpret_cast<uint8_t*>(scratch);
  if (E::bits < 8) __builtin_memset(codes + dim, 0, 8);
  for (int64_t begin = 0; begin < dim; begin += kBlock) {
    const int64_t count = dim - begin < kBlock ? dim - begin : kBlock;
    const int32_t most = largest_of(from + begin, count);
    if (most >= 0x7f800000) {  // one is not finite: so is the block
      __builtin_memset(codes + begin, 0, count);
      to[bytes + begin / kBlock] = 255;
      continue;
    }
    int32_t exponent = (most >> 23) - 127 - E::largest_exponent;
    exponent = exponent < -127 ? -127 : exponent < top ? exponent : top;
    if (level.ceil && exponent < top && bits_as<float>(most) > E::largest * scale_of(exponent + 127)) ++exponent;
    to[bytes + begin / kBlock] = static_cast<uint8_t>(exponent + 127);
    const float down = scale_of(127 - exponent);
    each(count, [&](auto lanes, int64_t at) {
      constexpr int W = decltype(lanes)::width;
      constexpr int32_t least = (128 - E::bias) << 23;  // of numbers that have all bits
      constexpr uint32_t last = uint32_t{254 + E::mantissa}
                                << 23;  // less an exponent: 1 over the step of numbers there
      const I<W> y = bits_as<I<W>>(V<W>(load<W>(from + begin + at) * down)), size = y & 0x7fffffff;
      const I<W> place = (size & 0x7f800000) > least ? size & 0x7f800000 : I<W>{} + least;
      const V<W> steps = bits_as<V<W>>(size) * bits_as<V<W>>(U<W>(last - bits_as<U<W>>(place)));
      const I<W> rounded = noise.on ? whole<W>(steps, noise.template at<W>(begin + at)) : nearest<W>(steps);
      I<W> code = ((place - least) >> (23 - E::mantissa)) + rounded;
      code = code < E::most ? code : I<W>{} + E::most;
      const I<W> negative = y >> 31;  // all bits of it
      if constexpr (E::complement) code = ((code ^ negative) - negative) & 255;
      else code = code | (negative & (1 << (E::bits - 1)));
      store_as(codes + begin + at, bytes_of<W>(code));
    });
  }
  if constexpr (E::bits < 8)
    for (int64_t first = 0, at = 0; first < dim; first += 8, at += E::bits) {
      uint64_t word = squeezed<E::bits>(load_as<uint64_t>(codes + first));
      for (int64_t i = at; i < at + E::bits && i < bytes; ++i, word >>= 8) to[i] = static_cast<uint8_t>(word);
    }
}

// A row after its rule. scratch: of at least dim + 8 bytes.
void encode(const Level& level, int64_t row, int64_t dim, const Rounding& rounding, const float* from, float* scratch) {
  uint8_t* const to = level.row(row);
  const Noise noise(level.stochastic, rounding, 0, level.number(row), rounding.column);
  switch (level.format) {
    case kFp32: __builtin_memcpy(to, from, dim * 4); return;
    case kFp16:
      return each(dim, [&](auto lanes, int64_t at) {
        constexpr int W = decltype(lanes)::width;
        store_as(to + at * 2, to_fp16<W>(load<W>(from + at), noise, at));
      });
    case kBf16:
      return each(dim, [&](auto lanes, int64_t at) {
        constexpr int W = decltype(lanes)::width;
        store_as(to + at * 2, to_bf16<W>(load<W>(from + at), noise, at));
      });
    case kInt8: return encode_int8(from, dim, to, noise);
    case kInt4: return encode_int4(from, dim, to, noise, scratch);
    case kMxint8: return encode_mx<Mxint8>(level, from, dim, to, noise, scratch);
    case kMxfp8: return encode_mx<Mxfp8>(level, from, dim, to, noise, scratch);
    case kMxfp6: return encode_mx<Mxfp6>(level, from, dim, to, noise, scratch);
    case kMxfp4: return encode_mx<Mxfp4>(level, from, dim, to, noise, scratch);
    case kSplitBf16: break;
  }
  uint8_t* const low = level.low + row * dim * 2;
  each(dim, [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    const I<W> bits = load_as<I<W>>(from + at);
    store_as(to + at * 2, halves_of<W>((bits >> 16) & 0xffff));
    store_as(low + at * 2, halves_of<W>(bits & 0xffff));
  });
}

// -- state in bf16 ---------------------------------------------------------------------------------------------------

// A field of a row's state: where it is kept, or decoded into `scratch`.
INLINE float* state_of(const Level& level, const Rule& rule, int field, int64_t row, int64_t dim, float* scratch) {
  const int64_t count = rule.wide[field] ? dim : 1;
  if (!level.narrow) return level.state[field] + row * count;
  const uint16_t* const from = reinterpret_cast<const uint16_t*>(level.state[field]) + row * count;
  each(count, [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    store<W>(scratch + at, from_bf16<W>(load_as<H<W>>(from + at)));
  });
  return scratch;
}

// The same of a level whose state is bf16, back to where it is kept.
INLINE void encode_state(const Level& level, const Rule& rule, const Rounding& rounding, int field, int64_t row,
                         int64_t dim, const float* from) {
  const int64_t count = rule.wide[field] ? dim : 1;
  const Noise noise(true, rounding, 1 + field, level.number(row), rule.wide[field] ? rounding.column : 0);
  uint16_t* const to = reinterpret_cast<uint16_t*>(level.state[field]) + row * count;
  each(count, [&](auto lanes, int64_t at) {
    constexpr int W = decltype(lanes)::width;
    store_as(to + at, to_bf16<W>(load<W>(from + at), noise, at));
  });
}
