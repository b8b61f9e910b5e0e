// What arguments.h declares.

#include "arguments.h"

#include <limits>

namespace sparrow::embedding_bag {
namespace {

constexpr int64_t kNumbers = 7;  // per rule: what `kernels/rules` gives

Rule rule_of(const std::string& name, float lr, const double* numbers) {
  Rule rule{};
  const double decay = numbers[0];
  rule.lr = lr;
  rule.l2 = numbers[1] ? 0 : static_cast<float>(decay);
  rule.keep = numbers[1] ? 1 - lr * static_cast<float>(decay) : 1;
  rule.clip_norm = static_cast<float>(numbers[2]);
  rule.max_norm = static_cast<float>(numbers[3]);
  rule.eps = static_cast<float>(numbers[4]);
  rule.beta1 = numbers[5];
  rule.beta2 = numbers[6];
  struct Known {
    const char* name;
    RuleKind kind;
    int fields;
    bool wide[kFields];
  };
  static const Known known[] = {{"sgd", kSgd, 0, {}},
                                {"rowwise_adagrad", kRowwiseAdagrad, 1, {false}},
                                {"adagrad", kAdagrad, 1, {true}},
                                {"adam", kAdam, 3, {true, true, false}},
                                {"rowwise_adam", kRowwiseAdam, 3, {true, false, false}}};
  for (const Known& k : known)
    if (name == k.name) {
      rule.kind = k.kind;
      rule.fields = k.fields;
      std::copy(k.wide, k.wide + kFields, rule.wide);
      return rule;
    }
  check(false, "rule ", name, " has no C++ row function; use impl='reference'");
  return rule;
}

// Rows of a format: their entries' type and bytes, and how many there are in a row of dim columns.
struct KnownFormat {
  const char* name;
  Format format;
  ScalarType type;
  int64_t entry;
  int64_t (*width)(int64_t dim);
  bool ceil;  // of MX formats
};

// Codes of so many bits, and a byte for each block.
template <int bits>
int64_t mx(int64_t dim) {
  return (dim * bits + 7) / 8 + (dim + kBlock - 1) / kBlock;
}

const KnownFormat& format_of(const std::string& name) {
  static const auto all = [](int64_t dim) { return dim; };
  static const KnownFormat known_formats[] = {
      {"fp32", kFp32, ScalarType::Float, 4, all},
      {"fp16", kFp16, ScalarType::Half, 2, all},
      {"bf16", kBf16, ScalarType::BFloat16, 2, all},
      {"split_bf16", kSplitBf16, ScalarType::BFloat16, 2, all},
      {"int8", kInt8, ScalarType::Byte, 1, [](int64_t dim) { return dim + 8; }},
      {"int4", kInt4, ScalarType::Byte, 1, [](int64_t dim) { return (dim + 1) / 2 + 4; }},
      {"mxint8", kMxint8, ScalarType::Byte, 1, mx<8>, true},
      {"mxint8_floor", kMxint8, ScalarType::Byte, 1, mx<8>},
      {"mxfp8", kMxfp8, ScalarType::Byte, 1, mx<8>, true},
      {"mxfp8_floor", kMxfp8, ScalarType::Byte, 1, mx<8>},
      {"mxfp6", kMxfp6, ScalarType::Byte, 1, mx<6>, true},
      {"mxfp6_floor", kMxfp6, ScalarType::Byte, 1, mx<6>},
      {"mxfp4", kMxfp4, ScalarType::Byte, 1, mx<4>, true},
      {"mxfp4_floor", kMxfp4, ScalarType::Byte, 1, mx<4>}};
  for (const KnownFormat& known : known_formats)
    if (name == known.name) return known;
  check(false, "format ", name, " has no C++ codec; use impl='reference'");
  return known_formats[0];
}

std::vector<std::string> names_in(const std::string& joined) {
  std::vector<std::string> names;
  for (size_t at = 0; at < joined.size(); at += names.back().size() + 1)
    names.push_back(joined.substr(at, joined.find(',', at) - at));
  return names;
}

// table, pooling, key, inverse (-1: none), output, column: the order of `cpp.py`
constexpr int64_t kNumbersPerFeature = 6;

// feature, second table, its key, sides: of `Lookups.products`
constexpr int64_t kNumbersPerProduct = 4;

}  // namespace

Tables::Tables(const std::vector<Tensor>& payload, const std::string& format_names,
               const std::vector<int64_t>& level_counts, const std::vector<int64_t>& dims)
    : counts(level_counts) {
  const std::vector<std::string> formats = names_in(format_names);
  check(dims.size() == level_counts.size(), "dims: expected one for each of ", level_counts.size(), " tables");
  levels.reserve(formats.size() + level_counts.size());
  size_t f = 0, p = 0;
  for (size_t t = 0; t < dims.size(); ++t) {
    const int64_t count = level_counts[t];
    check(count >= 1 && f + count <= formats.size(), "levels: they do not add up to the ", formats.size(), " formats");
    Table table{0, dims[t], {}, {}, levels.data() + levels.size()};
    check(table.dim >= 1, "weight_RD: a row needs at least one column");
    for (int64_t l = 0; l < count; ++l, ++f) {
      const KnownFormat& known = format_of(formats[f]);
      check(p < payload.size(), "payload: fewer tensors than the formats have");
      const Tensor& rows = payload[p++];
      Level level{};
      level.first = table.rows;
      level.format = known.format;
      level.ceil = known.ceil;
      level.rows = data<uint8_t>(rows, known.type, 2, "weight_RD");
      check(rows.size(1) == known.width(table.dim), "weight_RD: rows of ", rows.size(1), " entries, expected ",
            known.width(table.dim), " for ", table.dim, " columns");
      level.bytes = known.width(table.dim) * known.entry;
      if (known.format == kSplitBf16) {
        check(p < payload.size() && payload[p].numel() == rows.numel(), "low_RD: expected as many as high halves");
        level.low = data<uint8_t>(payload[p++], ScalarType::Short, 2, "low_RD");
      }
      table.rows += rows.size(0);
      levels.push_back(level);
      check(l == 0 || level.format == table.levels[l - 1].format || (l == 1 && table.levels->format == kFp32),
            "formats: only the first level of a table may be fp32 where others are not; use impl='reference'");
    }
    check(table.rows <= kMax, "more than 2**32 rows in a table; use impl='reference'");
    Level end{};
    end.first = std::numeric_limits<int64_t>::max();
    levels.push_back(end);
    all.push_back(table);
  }
  check(f == formats.size() && p == payload.size(), "payload: more tensors than the formats have");
}

void Tables::set_rules(const std::string& rules, const Tensor& lr_T, const Tensor& numbers_T,
                       const std::vector<Tensor>& state, const std::vector<Tensor>& touched,
                       const std::vector<Tensor>& changed, const std::vector<Tensor>& row_numbers,
                       const Tensor& rounding_T, int64_t n) {
  const std::vector<std::string> names = names_in(rules);
  const float* lr = data<float>(lr_T, ScalarType::Float, 1, "lr_T");
  check(names.size() == all.size() && lr_T.numel() == static_cast<int64_t>(all.size()) &&
            numbers_T.numel() == static_cast<int64_t>(kNumbers * all.size()),
        "rules: expected a name, a learning rate and ", kNumbers, " numbers for each of ", all.size(), " tables");
  const double* numbers = data<double>(numbers_T, ScalarType::Double, 1, "numbers_T");
  check(rounding_T.numel() == static_cast<int64_t>(3 * all.size() + touched.size()),
        "rounding: expected 3 numbers a table and one a level");
  const int64_t* rounding = data<int64_t>(rounding_T, ScalarType::Long, 1, "rounding_T");
  const auto of_level = [&](const std::vector<Tensor>& given, size_t w, int64_t rows, const char* name) -> int32_t* {
    check(given.empty() || given.size() == touched.size(), name, ": expected one for each level, or none");
    if (given.empty() || !given[w].numel()) return nullptr;
    check(given[w].numel() == rows, name, ": expected ", rows, " rows or none");
    return data<int32_t>(given[w], ScalarType::Int, 1, name);
  };
  size_t s = 0, w = 0;
  for (size_t t = 0; t < all.size(); ++t) {
    Table& table = all[t];
    table.rule = rule_of(names[t], lr[t], numbers + kNumbers * t);
    table.rounding = {rounding[3 * t], rounding[3 * t + 1], rounding[3 * t + 2], n};
    Level* level = const_cast<Level*>(table.levels);
    for (Level* const last = level + counts[t]; level < last; ++level, ++w) {
      const int64_t rows = std::min(level[1].first, table.rows) - level->first;
      check(w < touched.size() && touched[w].numel() == rows, "touched_R: expected ", rows, " rows");
      level->touched = data<uint8_t>(touched[w], ScalarType::Byte, 1, "touched_R");
      level->changed = of_level(changed, w, rows, "changed_R");
      level->numbers = of_level(row_numbers, w, rows, "rows_R");
      level->stochastic = rounding[3 * all.size() + w] != 0;
      level->narrow = table.rule.fields > 0 && s < state.size() && state[s].scalar_type() == ScalarType::BFloat16;
      for (int field = 0; field < table.rule.fields; ++field, ++s) {
        const bool wide = table.rule.wide[field];
        check(s < state.size() && state[s].numel() == rows * (wide ? table.dim : 1) && state[s].size(0) == rows,
              names[t], ": field ", field, " of the state does not have a number per ", wide ? "weight" : "row");
        const ScalarType type = level->narrow ? ScalarType::BFloat16 : ScalarType::Float;
        level->state[field] = static_cast<float*>(data<void>(state[s], type, wide ? 2 : 1, "state"));
      }
    }
  }
  check(s == state.size() && w == touched.size(), "rules: more state than they have fields");
}

int64_t widest(const std::vector<Table>& tables) {
  int64_t dim = 1;
  for (const Table& table : tables) dim = std::max(dim, table.dim);
  return dim;
}

Batch::Batch(const Tensor& slots_N, const Tensor& offsets_B1, const MaybeTensor& weights_N,
             const std::vector<Tensor>& inverses, const std::vector<int64_t>& bags, const std::vector<int64_t>& bounds,
             const std::vector<int64_t>& numbers, const std::vector<int64_t>& products,
             const std::vector<Table>& tables)
    : N(slots_N.numel()) {
  if (slots_N.scalar_type() == ScalarType::Int) slots32 = data<int32_t>(slots_N, ScalarType::Int, 1, "slots_N");
  else slots64 = data<int64_t>(slots_N, ScalarType::Long, 1, "slots_N");
  offsets = data<int64_t>(offsets_B1, ScalarType::Long, 1, "offsets_B1");
  check(!weights_N || weights_N->numel() == N, "weights_N: expected ", N, " values");
  weights = weights_N ? data<float>(*weights_N, ScalarType::Float, 1, "weights_N") : nullptr;
  const int64_t keys = static_cast<int64_t>(bags.size());
  check(static_cast<int64_t>(bounds.size()) == keys + 1, "bounds: expected one more than the ", keys, " keys");
  std::vector<int64_t> first{0};
  for (int64_t k = 0; k < keys; ++k) {
    check(bags[k] >= 0 && bounds[k] <= bounds[k + 1], "bags and bounds must not be negative or fall");
    check(bags[k] < offsets_B1.numel() - first[k], "offsets_B1 must go from 0 to the ", N,
          " slots and never fall, one for each of the bags and one more");
    first.push_back(first[k] + bags[k]);
  }
  check(first[keys] == offsets_B1.numel() - 1 && bounds[0] == 0 && bounds[keys] == N && offsets[0] == 0 &&
            offsets[first[keys]] == N,
        "offsets_B1 must go from 0 to the ", N, " slots and never fall");
  check(numbers.size() % kNumbersPerFeature == 0, "features: expected ", kNumbersPerFeature, " numbers for each");
  for (size_t i = 0; i < numbers.size(); i += kNumbersPerFeature) {
    const int64_t *n = numbers.data() + i, key = n[2];
    check(n[0] >= 0 && n[0] < static_cast<int64_t>(tables.size()) && n[1] >= 0 && n[1] <= kNone && key >= 0 &&
              key < keys && n[3] >= -1 && n[3] < static_cast<int64_t>(inverses.size()) && (n[3] < 0 || n[1] != kNone) &&
              n[4] >= 0 && n[5] >= 0,
          "features: feature ", i / kNumbersPerFeature, " names a table, key, inverse or output that is not there");
    Feature f{n[0], static_cast<Pooling>(n[1]), key, first[key], bags[key], bounds[key], bounds[key + 1]};
    check(f.pooling == kNone || (offsets[f.first] == f.low && offsets[f.first + f.bags] == f.high),
          "offsets_B1 must go from 0 to the ", N, " slots and never fall");
    f.weights_low = f.low;
    f.samples = f.units();
    f.output = n[4];
    f.column = n[5];
    if (n[3] >= 0) {
      const Tensor& inverse = inverses[n[3]];
      f.shared = true;
      f.inverse = data<int64_t>(inverse, ScalarType::Long, 1, "inverse_B");
      f.samples = inverse.numel();
      bool fine = true;
      for (int64_t b = 0; b < f.samples; ++b)
        fine &= static_cast<uint64_t>(f.inverse[b]) < static_cast<uint64_t>(f.bags);
      check(fine, "inverse_B: an index is outside [0, ", f.bags, ")");
    }
    check(f.output <= outputs(), "output ", f.output, ": outputs must follow one another");
    if (f.output == outputs()) {
      output_rows.push_back(f.samples);
      output_columns.push_back(0);
    }
    check(output_rows[f.output] == f.samples, "output ", f.output, ": its features differ in their number of samples");
    check(f.column == output_columns[f.output], "output ", f.output, ": columns must follow one another");
    output_columns[f.output] += tables[f.table].dim;
    features.push_back(f);
  }
  check(products.size() % kNumbersPerProduct == 0, "products: expected ", kNumbersPerProduct, " numbers for each");
  for (size_t i = 0; i < products.size(); i += kNumbersPerProduct) {
    const int64_t* n = products.data() + i;
    check(n[0] >= 0 && n[0] < static_cast<int64_t>(features.size()) && n[1] >= -1 &&
              n[1] < static_cast<int64_t>(tables.size()) && n[2] < keys && (n[1] < 0 || n[2] >= 0),
          "products: they name a feature, table or key that is not there");
    Feature& f = features[n[0]];
    f.sides = n[3];
    if (n[1] < 0) continue;
    f.by = n[1];
    f.by_first = first[n[2]];
    f.by_low = bounds[n[2]];
    bool same = tables[f.by].dim == tables[f.table].dim && bags[n[2]] == f.bags &&
                bounds[n[2] + 1] - f.by_low == f.high - f.low;
    for (int64_t b = 0; same && b < f.bags; ++b)
      same = offsets[f.by_first + b] - f.by_low == offsets[f.first + b] - f.low;
    check(same, "features: feature ", n[0], " multiplies rows of other dims, or bags of other lengths");
  }
}

bool Batch::rising(const Feature& f, int64_t begin, int64_t end) {
  if (f.pooling == kNone) return true;
  const int64_t* o = offsets + f.first;
  bool fine = true;
  for (int64_t b = begin; b < end; ++b) fine &= o[b] <= o[b + 1];
  fine = fine && o[begin] >= f.low && o[end] <= f.high;
  if (!fine) bad_offsets = true;
  return fine;
}

void Batch::raise(const std::vector<Table>& tables) const {
  check(!bad_offsets, "offsets_B1 must go from 0 to the ", N, " slots and never fall");
  for (size_t i = 0; bad_slots && i < features.size(); ++i)
    with_slots([&, &f = features[i]](const auto* slots) {
      auto look = [&](int64_t table, int64_t low) {
        for (int64_t n = low; n < low + f.high - f.low; ++n)
          check(slots[n] >= 0 && slots[n] < tables[table].rows, "slot ", slots[n], " at position ", n - low,
                " of feature ", i, " is outside [0, ", tables[table].rows, ") of table ", table);
      };
      look(f.table, f.low);
      if (f.by >= 0) look(f.by, f.by_low);
    });
}

int64_t Batch::work(const std::vector<Table>& tables) const {
  int64_t floats = 0;
  for (const Feature& f : features) floats += ((f.by < 0 ? 1 : 2) * (f.high - f.low) + f.units()) * tables[f.table].dim;
  return floats;
}

Places places_of(const Table& table, const uint8_t* const* rows) {
  const Level* last = table.levels;  // all levels after the first are alike
  while (last[1].first < table.rows) ++last;
  return {last->format, last->format != table.levels->format, last->bytes, rows};
}

const float* factors_of(const Table& table) {
  check(table.levels->format == kFp32 && table.levels[1].first >= table.rows,
        "features: one multiplies rows that are not of fp32 on one level; use impl='reference'");
  return reinterpret_cast<const float*>(table.levels->rows);
}

bool find_rows(Batch& batch, const Table& table, int64_t begin, int64_t end, const uint8_t** rows) {
  if (!batch.within(begin, end, table.rows)) return false;
  batch.with_slots([&](const auto* slots) {
    const int64_t count = end - begin;
    const Places places = places_of(table, rows);
    slots += begin;
    if (table.levels[1].first >= table.rows) {
      const uint8_t* all = table.levels[0].rows;
      for (int64_t n = 0; n < count; ++n) rows[n] = all + slots[n] * places.bytes;
    } else {
      for (int64_t n = 0; n < count; ++n) {
        const Level& level = table.level_of(slots[n]);
        rows[n] = level.row(slots[n] - level.first);
        if (places.mixed && &level == table.levels)
          rows[n] = reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(rows[n]) | kFrame);
      }
    }
    for (int64_t n = 0; n < std::min(count, ahead_of(places.bytes)); ++n) prefetch(address_of(rows[n]), places.bytes);
  });
  return true;
}

}  // namespace sparrow::embedding_bag
