// A request's Python values -> ids and numbers. `serving/requests.py` has the definition: the transforms of a log.
//
// A column with a value that is not dealt with here is refused, and the definition encodes it, or says what is wrong.
// Values are read under the interpreter's lock; it is let go while they are hashed and looked up.

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <new>
#include <string>
#include <string_view>
#include <vector>

namespace sparrow {
namespace {

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kExact = 9007199254740992.0;  // 2^53: larger floats may have lost digits
constexpr int64_t kMissing = 0, kUnknown = 1, kFirst = 2;
constexpr char kPlan[] = "sparrow.encode_plan";

enum Kind { kHash, kVocabulary, kRange, kBuckets, kNumber, kRefused };  // KINDS in __init__.py
enum class Tag : uint8_t { kNone, kInt, kBool, kFloat, kText };

// A value as Python has it. Text is the object's own, which is kept alive until it has been encoded.
struct Value {
  Tag tag = Tag::kNone;
  int64_t integer = 0;
  double number = 0;
  std::string_view text;
};

// What a column's values become. See `Column` in __init__.py.
struct Column {
  PyObject* source;
  PyObject* weights;
  int kind;
  bool is_list;
  int64_t max_length;     // or -1
  bool is_white;          // lists that are text are cut at white space
  std::string separator;  // else at this; "" for text that is not cut here
  std::vector<std::string> missing;
  std::vector<double> missing_numbers;
  const int64_t* hashes;     // of a vocabulary, ascending; of a range, whether each integer is known
  const double* boundaries;  // of buckets
  int64_t count, low;
  std::vector<int32_t> rows;     // of the hashes
  std::vector<uint32_t> begins;  // where the hashes with the same high bits begin
  int shift;
};

struct Plan {
  std::vector<Column> columns;
  ~Plan() {
    for (Column& column : columns) {
      Py_XDECREF(column.source);
      Py_XDECREF(column.weights);
    }
  }
};

// A column of a request: values, and where the list of each row ends.
struct Taken {
  std::vector<Value> values;
  std::vector<int64_t> ends;
  std::vector<float> weights;
  std::vector<uint8_t> is_text;  // whether a row's list is a text that is to be cut
  std::vector<int64_t> ids, lengths;
  std::vector<float> kept_weights;
  std::vector<double> numbers;
  bool is_refused = false;
};

inline uint64_t mix(uint64_t z) {
  z += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

// `hash_ids` of features/hashing.py.
int64_t hash(std::string_view text) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t h = mix(text.size());
  for (size_t at = 0; at < text.size(); at += 8) {
    uint64_t word = 0;
    std::memcpy(&word, text.data() + at, std::min<size_t>(8, text.size() - at));
    h = mix(h ^ word);
  }
  return std::max<int64_t>(static_cast<int64_t>(h & std::numeric_limits<int64_t>::max()), 1);
}

int64_t hash(int64_t integer) {
  char digits[24];
  const auto end = std::to_chars(digits, digits + sizeof digits, integer).ptr;
  return hash(std::string_view(digits, end - digits));
}

bool is_ascii(std::string_view text) {
  return std::all_of(text.begin(), text.end(), [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

bool is_white(char c) { return (c >= 0x09 && c <= 0x0D) || (c >= 0x1C && c <= 0x20); }

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && is_white(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_white(text.back())) text.remove_suffix(1);
  return text;
}

// -- what values are -------------------------------------------------------------------------------------------------

int64_t row_of_hash(const Column& column, int64_t hash) {
  if (!column.count) return kUnknown;
  const uint64_t bucket = static_cast<uint64_t>(hash) >> column.shift;
  const int64_t* low = column.hashes + column.begins[bucket];
  const int64_t* high = column.hashes + column.begins[bucket + 1];
  const int64_t* at = std::lower_bound(low, high, hash);
  return at != high && *at == hash ? column.rows[at - column.hashes] : kUnknown;
}

// Whether a value stands for none. Sets `refused` where only the definition can tell.
bool is_missing(const Column& column, const Value& value, bool& refused) {
  if (value.tag == Tag::kNone || (value.tag == Tag::kFloat && std::isnan(value.number))) return true;
  if (column.missing.empty()) return false;
  char digits[24];
  std::string_view text;
  switch (value.tag) {
    case Tag::kFloat:
      return std::find(column.missing_numbers.begin(), column.missing_numbers.end(), value.number) !=
             column.missing_numbers.end();
    case Tag::kInt:
      text = std::string_view(digits, std::to_chars(digits, digits + sizeof digits, value.integer).ptr - digits);
      break;
    case Tag::kBool: text = value.integer ? "true" : "false"; break;
    default: refused |= !is_ascii(value.text); text = trimmed(value.text);
  }
  return std::find(column.missing.begin(), column.missing.end(), text) != column.missing.end();
}

bool as_integer(std::string_view text, int64_t& found) {
  const size_t digits = text.size() - (!text.empty() && text.front() == '-');
  if (digits < 1 || digits > 18) return false;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), found);
  return read.ec == std::errc() && read.ptr == text.data() + text.size();
}

bool as_number(std::string_view text, double& found) {
#if defined(__cpp_lib_to_chars)
  if (!is_ascii(text)) return false;
  text = trimmed(text);
  found = kNaN;
  if (text.empty()) return true;
  if (text.find_first_not_of("0123456789.eE+-") != text.npos) return false;
  const auto read = std::from_chars(text.data(), text.data() + text.size(), found);
  return read.ec == std::errc() && read.ptr == text.data() + text.size();
#else
  return false;
#endif
}

double number_of(const Column& column, const Value& value, bool& refused) {
  if (is_missing(column, value, refused)) return kNaN;
  double found = value.number;
  if (value.tag == Tag::kInt || value.tag == Tag::kBool) found = static_cast<double>(value.integer);
  if (value.tag == Tag::kText) refused |= !as_number(value.text, found);
  refused |= std::abs(found) > std::numeric_limits<float>::max();
  return found;
}

int64_t id_of(const Column& column, const Value& value, bool& refused) {
  if (column.kind == kBuckets) {
    const double number = number_of(column, value, refused);
    const double* end = column.boundaries + column.count;
    return std::isnan(number) ? kMissing
                              : std::lower_bound(column.boundaries, end, number) - column.boundaries + kFirst;
  }
  if (is_missing(column, value, refused)) return kMissing;
  const std::string_view id = trimmed(value.text);
  int64_t integer = value.integer;
  bool is_integer = value.tag == Tag::kInt;
  if (value.tag == Tag::kFloat) {
    is_integer = std::abs(value.number) <= kExact && value.number == std::rint(value.number);
    if (!is_integer) return refused = true, kMissing;
    integer = static_cast<int64_t>(value.number);
  }
  if (column.kind == kRange) {
    if (value.tag == Tag::kText) is_integer = as_integer(id, integer);
    if (!is_integer) return refused = true, kMissing;
    // As unsigned numbers: the difference of the ends of 64 bits is none of 64 bits with a sign.
    const uint64_t place = static_cast<uint64_t>(integer) - static_cast<uint64_t>(column.low);
    const bool is_inside = integer >= column.low && place < static_cast<uint64_t>(column.count);
    const int32_t* counts = reinterpret_cast<const int32_t*>(column.hashes);
    return is_inside && counts[place] < 0 ? static_cast<int64_t>(place) + kFirst : kUnknown;
  }
  int64_t found;
  if (is_integer) found = hash(integer);
  else if (value.tag == Tag::kBool) found = hash(value.integer ? "true" : "false");
  else found = hash(id);
  return column.kind == kVocabulary ? row_of_hash(column, found) : found;
}

// -- without the interpreter's lock ----------------------------------------------------------------------------------

// Adds the ids of a text's list. It has no weights.
void cut(const Column& column, std::string_view text, Taken& taken) {
  if ((!column.is_white && column.separator.empty()) || !is_ascii(text)) return void(taken.is_refused = true);
  text = trimmed(text);
  Value part{Tag::kText};
  while (!text.empty()) {
    size_t end = 0, next = 0;
    if (column.is_white) {
      while (end < text.size() && !is_white(text[end])) ++end;
      next = end;
      while (next < text.size() && is_white(text[next])) ++next;
    } else {
      end = std::min(text.find(column.separator), text.size());
      next = std::min(end + column.separator.size(), text.size());
    }
    part.text = trimmed(text.substr(0, end));
    if (!part.text.empty()) taken.ids.push_back(id_of(column, part, taken.is_refused));
    text.remove_prefix(next);
  }
}

void encode(const Column& column, Taken& taken) {
  if (taken.is_refused) return;
  if (column.kind == kNumber) {
    taken.numbers.reserve(taken.values.size());
    for (const Value& value : taken.values) taken.numbers.push_back(number_of(column, value, taken.is_refused));
    return;
  }
  taken.ids.reserve(taken.values.size());
  if (!column.is_list) {
    for (const Value& value : taken.values) taken.ids.push_back(id_of(column, value, taken.is_refused));
    taken.lengths.assign(taken.values.size(), 1);
    return;
  }
  const bool is_weighted = column.weights != nullptr;
  size_t from = 0;
  for (size_t row = 0; row < taken.ends.size(); ++row) {
    const size_t first = taken.ids.size(), to = taken.ends[row];
    if (taken.is_text[row]) cut(column, taken.values[from].text, taken);
    else
      for (size_t at = from; at < to; ++at) {
        if (is_missing(column, taken.values[at], taken.is_refused)) continue;
        taken.ids.push_back(id_of(column, taken.values[at], taken.is_refused));
        if (is_weighted) taken.kept_weights.push_back(taken.weights[at]);
      }
    int64_t length = taken.ids.size() - first;
    if (column.max_length >= 0 && length > column.max_length) {  // the last ones stay
      const int64_t more = length - column.max_length;
      taken.ids.erase(taken.ids.begin() + first, taken.ids.begin() + first + more);
      if (is_weighted)
        taken.kept_weights.erase(taken.kept_weights.begin() + first, taken.kept_weights.begin() + first + more);
      length = column.max_length;
    }
    taken.lengths.push_back(length);
    from = to;
  }
}

// -- with it ---------------------------------------------------------------------------------------------------------

struct Kept {
  std::vector<PyObject*> objects;
  ~Kept() {
    for (PyObject* object : objects) Py_DECREF(object);
  }
};

bool read(PyObject* object, Value& value, Kept& kept) {
  if (object == Py_None) return true;
  if (object == Py_True || object == Py_False) {
    value.tag = Tag::kBool;
    value.integer = object == Py_True;
    return true;
  }
  if (PyUnicode_Check(object)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);
    if (!text) return PyErr_Clear(), false;
    value.tag = Tag::kText;
    value.text = {text, static_cast<size_t>(size)};
    kept.objects.push_back(object);
    Py_INCREF(object);
    return true;
  }
  if (PyLong_Check(object)) {
    int overflow = 0;
    value.tag = Tag::kInt;
    value.integer = PyLong_AsLongLongAndOverflow(object, &overflow);
    return !overflow;
  }
  if (PyFloat_Check(object)) {
    value.tag = Tag::kFloat;
    value.number = PyFloat_AsDouble(object);
    return true;
  }
  return false;
}

// Rows of a request: a list of dicts, or a dict of lists.
struct Rows {
  PyObject* object;
  int64_t count;
  bool are_dicts;

  // The list of a column's values, or nullptr.
  PyObject* list_of(PyObject* name) const {
    if (are_dicts) return nullptr;
    PyObject* found = PyDict_GetItemWithError(object, name);
    return found && PyList_Check(found) && PyList_Size(found) == count ? found : nullptr;
  }

  // A value, or nullptr. list: what `list_of` returned. All are borrowed.
  PyObject* at(PyObject* list, PyObject* name, int64_t row) const {
    if (!are_dicts) return list ? PyList_GetItem(list, row) : nullptr;
    PyObject* dict = PyList_GetItem(object, row);
    return PyDict_Check(dict) ? PyDict_GetItemWithError(dict, name) : nullptr;
  }
};

bool take_list(const Column& column, PyObject* object, PyObject* weights, Taken& taken, Kept& kept) {
  Value value;
  if (object == Py_None && (!column.weights || weights == Py_None)) return true;
  if (PyUnicode_Check(object) && !column.weights) {
    if (!read(object, value, kept)) return false;
    taken.values.push_back(value);
    taken.is_text.back() = 1;
    return true;
  }
  if (!PyList_Check(object)) return false;
  const Py_ssize_t size = PyList_Size(object);
  if (column.weights && (!PyList_Check(weights) || PyList_Size(weights) != size)) return false;
  for (Py_ssize_t i = 0; i < size; ++i) {
    value = Value();
    if (!read(PyList_GetItem(object, i), value, kept)) return false;
    taken.values.push_back(value);
    if (!column.weights) continue;
    Value weight;
    if (!read(PyList_GetItem(weights, i), weight, kept)) return false;
    if (weight.tag != Tag::kInt && weight.tag != Tag::kFloat) return false;
    if (weight.tag == Tag::kInt) weight.number = static_cast<double>(weight.integer);
    const float w = static_cast<float>(weight.number);
    if (!std::isfinite(w) || (weight.tag == Tag::kInt && std::abs(weight.number) > kExact)) return false;
    taken.weights.push_back(w);
  }
  return true;
}

void take(const Column& column, const Rows& rows, Taken& taken, Kept& kept) {
  if (column.kind == kRefused) return void(taken.is_refused = true);
  taken.values.reserve(rows.count);
  PyObject *list = rows.list_of(column.source), *weights = column.weights ? rows.list_of(column.weights) : nullptr;
  for (int64_t row = 0; row < rows.count; ++row) {
    PyObject* object = rows.at(list, column.source, row);
    if (!object) return void(taken.is_refused = true);
    if (column.is_list) {
      PyObject* theirs = column.weights ? rows.at(weights, column.weights, row) : Py_None;
      taken.is_text.push_back(0);
      if (!theirs || !take_list(column, object, theirs, taken, kept)) return void(taken.is_refused = true);
      taken.ends.push_back(taken.values.size());
    } else {
      taken.values.emplace_back();
      if (!read(object, taken.values.back(), kept)) return void(taken.is_refused = true);
    }
  }
}

bool rows_from(PyObject* object, Py_ssize_t count, Rows& rows) {
  rows = {object, count, static_cast<bool>(PyList_Check(object))};
  if (rows.are_dicts ? PyList_Size(object) == count : static_cast<bool>(PyDict_Check(object))) return true;
  PyErr_SetString(PyExc_TypeError, "rows are a list of dicts or a dict of lists");
  return false;
}

template <class T>
T* append(const std::vector<T>& from, T* to) {
  return std::copy(from.begin(), from.end(), to);
}

// (plan, rows, count, others, their count, which columns are read of the others)
// -> (bytes, bounds, refused, counts of ids, rows and numbers).
// The bytes are ids [N], offsets [rows of all id columns + 1], lengths, numbers float64 column by column, weights.
PyObject* encode(PyObject*, PyObject* arguments) {
  PyObject *capsule, *first, *second;
  Py_ssize_t count, others, mask_size;
  const char* mask;
  if (!PyArg_ParseTuple(arguments, "OOnOny#", &capsule, &first, &count, &second, &others, &mask, &mask_size)) {
    return nullptr;
  }
  const Plan* plan = static_cast<const Plan*>(PyCapsule_GetPointer(capsule, kPlan));
  Rows sides[2];
  if (!plan || !rows_from(first, count, sides[0]) || !rows_from(second, others, sides[1])) return nullptr;
  const size_t columns = plan->columns.size();
  if (static_cast<size_t>(mask_size) != columns) {
    PyErr_SetString(PyExc_ValueError, "a mark for each column");
    return nullptr;
  }
  std::vector<Taken> taken(columns);
  Kept kept;
  for (size_t c = 0; c < columns; ++c) {
    take(plan->columns[c], sides[mask[c] != 0], taken[c], kept);
  }
  if (PyErr_Occurred()) return nullptr;
  PyThreadState* state = PyEval_SaveThread();
  try {
    for (size_t c = 0; c < columns; ++c) encode(plan->columns[c], taken[c]);
  } catch (...) {
    PyEval_RestoreThread(state);
    throw;
  }
  PyEval_RestoreThread(state);

  int64_t ids = 0, rows = 0, numbers = 0, weights = 0;
  for (size_t c = 0; c < columns; ++c) {
    if (taken[c].is_refused) taken[c] = Taken{.is_refused = true};
    ids += taken[c].ids.size();
    rows += taken[c].lengths.size();
    numbers += taken[c].numbers.size();
    weights += plan->columns[c].weights != nullptr;
  }
  PyObject* buffer =
      PyByteArray_FromStringAndSize(nullptr, 8 * (ids + 2 * rows + 1 + numbers) + (weights ? 4 * ids : 0));
  PyObject* bounds = PyTuple_New(columns + 1);
  PyObject* refused = PyList_New(0);
  if (!buffer || !bounds || !refused) return nullptr;
  int64_t* to = reinterpret_cast<int64_t*>(PyByteArray_AsString(buffer));
  int64_t *offsets = to + ids, *lengths = offsets + rows + 1, at = 0;
  double* number = reinterpret_cast<double*>(lengths + rows);
  float* weight = reinterpret_cast<float*>(number + numbers);
  *offsets++ = 0;
  for (size_t c = 0; c < columns; ++c) {
    const Taken& one = taken[c];
    PyTuple_SetItem(bounds, c, PyLong_FromLongLong(at));
    to = append(one.ids, to);
    lengths = append(one.lengths, lengths);
    number = append(one.numbers, number);
    for (int64_t length : one.lengths) *offsets++ = at += length;
    if (weights) {
      if (plan->columns[c].weights) weight = append(one.kept_weights, weight);
      else weight = std::fill_n(weight, one.ids.size(), 1.0f);
    }
    if (one.is_refused) {
      PyObject* number_of_column = PyLong_FromSize_t(c);
      PyList_Append(refused, number_of_column);
      Py_XDECREF(number_of_column);
    }
  }
  PyTuple_SetItem(bounds, columns, PyLong_FromLongLong(at));
  return Py_BuildValue("NNNnnn", buffer, bounds, refused, Py_ssize_t{ids}, Py_ssize_t{rows}, Py_ssize_t{numbers});
}

// Cuts the hashes by their high bits, so that some eight have the same.
void index(Column& column) {
  column.shift = 63;
  while (column.shift > 0 && (int64_t{8} << (63 - column.shift)) < column.count) --column.shift;
  const uint64_t buckets = uint64_t{1} << (63 - column.shift);
  column.begins.assign(buckets + 1, 0);
  for (int64_t i = 0; i < column.count; ++i)
    ++column.begins[(static_cast<uint64_t>(column.hashes[i]) >> column.shift) + 1];
  for (uint64_t b = 0; b < buckets; ++b) column.begins[b + 1] += column.begins[b];
}

bool texts(PyObject* tuple, std::vector<std::string>& found) {
  for (Py_ssize_t i = 0; i < PyTuple_Size(tuple); ++i) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(PyTuple_GetItem(tuple, i), &size);
    if (!text) return false;
    found.emplace_back(text, size);
  }
  return true;
}

// A list of tuples, see `Column.packed` -> the plan.
PyObject* plan(PyObject*, PyObject* list) {
  Plan* made = new Plan;
  PyObject* capsule =
      PyCapsule_New(made, kPlan, [](PyObject* it) { delete static_cast<Plan*>(PyCapsule_GetPointer(it, kPlan)); });
  if (!capsule) return delete made, nullptr;
  for (Py_ssize_t i = 0; i < PyList_Size(list); ++i) {
    Column column{};
    PyObject *missing, *numbers;
    const char* separator;
    unsigned long long hashes, rows, boundaries;
    long long max_length, count, low;
    if (!PyArg_ParseTuple(PyList_GetItem(list, i), "OOipLzO!O!KKKLL", &column.source, &column.weights, &column.kind,
                          &column.is_list, &max_length, &separator, &PyTuple_Type, &missing, &PyTuple_Type, &numbers,
                          &hashes, &rows, &boundaries, &count, &low)) {
      return Py_DECREF(capsule), nullptr;
    }
    column.max_length = max_length;
    column.is_white = !separator;
    if (separator) column.separator = separator;
    column.hashes = reinterpret_cast<const int64_t*>(hashes);
    column.boundaries = reinterpret_cast<const double*>(boundaries);
    column.count = count;
    column.low = low;
    Py_INCREF(column.source);
    if (column.weights == Py_None) column.weights = nullptr;
    Py_XINCREF(column.weights);
    if (column.kind == kVocabulary) {
      const int64_t* from = reinterpret_cast<const int64_t*>(rows);
      column.rows.assign(from, from + count);
      index(column);
    }
    const bool fine = texts(missing, column.missing);
    for (Py_ssize_t n = 0; n < PyTuple_Size(numbers); ++n) {
      column.missing_numbers.push_back(PyFloat_AsDouble(PyTuple_GetItem(numbers, n)));
    }
    made->columns.push_back(std::move(column));
    if (!fine || PyErr_Occurred()) return Py_DECREF(capsule), nullptr;
  }
  return capsule;
}

template <PyObject* (*f)(PyObject*, PyObject*)>
PyObject* guarded(PyObject* self, PyObject* argument) {
  try {
    return f(self, argument);
  } catch (const std::bad_alloc&) {
    return PyErr_NoMemory();
  }
}

PyMethodDef kMethods[] = {{"encode_plan", guarded<plan>, METH_O, nullptr},
                          {"encode", guarded<encode>, METH_VARARGS, nullptr},
                          {nullptr, nullptr, 0, nullptr}};
PyModuleDef kModule = {PyModuleDef_HEAD_INIT, "_cpp", nullptr, -1, kMethods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace sparrow

// The library's operators are torch's; these two take Python's objects.
PyMODINIT_FUNC PyInit__cpp() { return PyModule_Create(&sparrow::kModule); }
