// The inner loops, which cpu.cpp includes once for each kind of processor. Before it stand, of a vector of LANES
// channels:
//
//   Codes, Weights              four codes of a row, and four weights of each channel, as `dot` wants them
//   Codes spread(int32_t)       of four bytes, unsigned
//   Weights weights(int8_t*)    of LANES times four bytes, signed
//   Ints dot(Ints, Codes, Weights)   sums plus the four products, exactly
//   kRows, kVectors             of the sums that stay in registers

constexpr int64_t kPanel = kVectors * LANES;  // channels of a tile

// The largest number of a vector, found in pairs; in the vector's own memory its loop would write it at every turn.
template <class T, class V>
INLINE T largest(const V& v) {
  T at[LANES];
  __builtin_memcpy(at, &v, sizeof v);
  UNROLLED
  for (int w = LANES / 2; w; w /= 2) {
    UNROLLED
    for (int i = 0; i < w; ++i) at[i] = at[i] > at[i + w] ? at[i] : at[i + w];
  }
  return at[0];
}

// Numbers to codes; see `Static` and `codes` in reference.py.
INLINE Row encoded(const Job& a, int64_t b, uint8_t* to) {
  const float* x = a.x + b * a.inputs;
  Ints worst{};  // magnitudes as bits: from 0x7f800000 on they are infinite or not a number
  Floats low{}, high{};
  Row row{a.scale, a.zero, a.plus ? a.plus + a.index[b] * a.outputs : nullptr};
  if (a.is_dynamic) {
    for (int64_t c = 0; c < a.inputs; c += LANES) {
      const Floats v = load<Floats>(x + c, a.inputs - c);
      low = v < low ? v : low;
      high = v > high ? v : high;
    }
    const float least = -largest<float>(-low), most = largest<float>(high);
    row.scale = std::max(most / 255.0f - least / 255.0f, kLeastScale);
    row.zero = static_cast<int32_t>(std::min(255.0f, __builtin_nearbyintf(-least * (1.0f / row.scale))));
  }
  const float inverse = 1.0f / row.scale;
  for (int64_t c = 0; c < a.inputs; c += LANES) {
    const Floats v = load<Floats>(x + c, a.inputs - c);
    const Ints magnitude = (Ints)v & 0x7fffffff;
    worst = magnitude > worst ? magnitude : worst;
    Floats t = v * inverse;  // what is beyond 256 has the code at the end, whatever the zero point is
    t = t > -256.0f ? t : Floats{} - 256.0f;
    t = t < 256.0f ? t : Floats{} + 256.0f;
    Ints code = (Ints)(t + kRounder) - kRounderBits + row.zero;  // the addition rounds to nearest, ties to even
    code = code < 0 ? Ints{} : code;
    code = code > 255 ? Ints{} + 255 : code;
    const Bytes bytes = __builtin_convertvector(code, Bytes);
    __builtin_memcpy(to + c, &bytes, sizeof bytes);
  }
  const bool is_plus_finite = !row.plus || row.plus[0] != kNotFinite;
  if (!is_plus_finite || largest<int32_t>(worst) >= 0x7f800000) row.scale = __builtin_nanf(""), row.zero = 0;
  return row;
}

// Sums of row b to outputs, from channel o on.
template <int N>
__attribute__((noinline)) void finish(const Job& a, const Row& row, const Ints* sums, int64_t b, int64_t o) {
  for (int n = 0; n < N && o < a.outputs; ++n, o += LANES) {
    const int64_t at = b * a.outputs + o, left = a.outputs - o;
    Ints sum = sums[n] - load<Ints>(a.weight_sums + o, LANES) * row.zero;
    if (row.plus) sum += load<Ints>(row.plus + o, left);
    if (!a.scales) {
      store(static_cast<int32_t*>(a.out) + at, row.scale == row.scale ? sum : Ints{} + kNotFinite, left);
      continue;
    }
    const Floats factor = load<Floats>(a.scales + o, LANES) * row.scale;
    Floats y = __builtin_convertvector(sum, Floats) * factor + load<Floats>(a.biases + o, LANES);
    if (a.relu) y = y < 0 ? Floats{} : y;
    store(static_cast<float*>(a.out) + at, y, left);
  }
}

// M rows times N vectors of channels, from channel o on.
template <int M, int N>
void tile(const Job& a, const Row* rows, const uint8_t* codes, int64_t b, int64_t o) {
  Ints sums[M][N];
  UNROLLED
  for (int m = 0; m < M; ++m) {
    UNROLLED
    for (int n = 0; n < N; ++n) sums[m][n] = Ints{};
  }
  const int64_t block = a.padded * kBlock;
  const int8_t* tiles = a.tiles + o / kBlock * block;
  for (int64_t k = 0; k < a.padded; k += 4) {
    Weights w[N];
    UNROLLED
    for (int n = 0; n < N; ++n)
      w[n] = weights(tiles + n * LANES / kBlock * block + k * kBlock + n * LANES % kBlock * 4);
    UNROLLED
    for (int m = 0; m < M; ++m) {
      int32_t four;
      __builtin_memcpy(&four, codes + m * a.stride + k, 4);
      const Codes x = spread(four);
      UNROLLED
      for (int n = 0; n < N; ++n) sums[m][n] = dot(sums[m][n], x, w[n]);
    }
  }
  Ints kept[M * N];
  UNROLLED
  for (int m = 0; m < M; ++m) {
    UNROLLED
    for (int n = 0; n < N; ++n) kept[m * N + n] = sums[m][n];
  }
  for (int m = 0; m < M; ++m) finish<N>(a, rows[m], kept + m * N, b + m, o);
}

using Tile = void (*)(const Job&, const Row*, const uint8_t*, int64_t, int64_t);

template <int M, int... N>
constexpr std::array<Tile, kVectors> tiles_of(std::integer_sequence<int, N...>) {
  return {tile<M, N + 1>...};
}

template <int... M>
constexpr std::array<std::array<Tile, kVectors>, kRows> all_tiles(std::integer_sequence<int, M...>) {
  return {tiles_of<M + 1>(std::make_integer_sequence<int, kVectors>())...};
}

// Rows [begin, end) times channels [first, last); `first` begins a panel.
void multiply(const Job& a, int64_t begin, int64_t end, int64_t first, int64_t last) {
  static constexpr auto tiles = all_tiles(std::make_integer_sequence<int, kRows>());
  const int64_t chunk = std::min(end - begin, std::max<int64_t>(kScratch / a.stride / kRows, 1) * kRows);
  std::vector<uint8_t> codes(chunk * a.stride);
  std::vector<Row> rows(chunk);
  for (int64_t r = begin; r < end; r += chunk) {
    const int64_t count = std::min(chunk, end - r);
    for (int64_t b = 0; b < count; ++b) rows[b] = encoded(a, r + b, codes.data() + b * a.stride);
    for (int64_t o = first; o < last; o += kPanel) {
      const int64_t vectors = (std::min(last - o, kPanel) + LANES - 1) / LANES;
      for (int64_t b = 0; b < count; b += kRows)
        tiles[std::min<int64_t>(count - b, kRows) - 1][vectors - 1](a, &rows[b], codes.data() + b * a.stride, r + b, o);
    }
  }
}
