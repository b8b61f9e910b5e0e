// The blocks of one file and the records that wait to be written. reference.py beside this file is the definition.
//
// The engine (engine.h) does the reads and writes. It calls `next_write`, `work` and `finish`; only `work`
// runs without its lock.

#pragma once

#include "../cpu.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace sparrow::block_io {

// What went wrong with a block, or with all that was written. cpp.py makes a sentence of it.
enum Kind : int64_t { kFine, kRead, kShort, kChecksum, kOther, kWrite, kSync };
struct Error {
  int64_t kind = kFine, code = 0, block = 0, place = 0;  // code: errno
  int64_t number = 0, generation = 0, expected = 0;      // kOther: what is there, and the generation of the map
};

struct Field {
  uint8_t* to;
  int64_t bytes;  // of a row
};

// A fetch under way. It holds its tensors, and is destroyed by its caller's thread.
struct Reading {
  std::vector<Tensor> tensors;
  std::vector<Field> into;
  const int64_t *rows, *at;
  bool* never;
  std::vector<uint8_t> is_taken;  // whether a row was in the queue
  int64_t open = 0;               // blocks that are still to be read
  Error error;
};

class Store;

constexpr int64_t kMostBlock = 64 << 10;  // bytes of a block, and of what is read or written at once
constexpr int64_t kMostRun = 16;          // blocks that are

// Blocks of a table at neighbouring places, to be read or written at once.
struct Op {
  Store* store;
  Reading* reading;     // null: a write-back
  int64_t first, last;  // the rows of the fetch that are in the blocks; others may be between
  bool is_write;
  uint32_t place, count;
  struct {
    uint32_t block, generation;
  } of[kMostRun];
  int64_t done = 0;  // bytes that were read or written so far
};

// How many maps name each place of the file and how many reads of it are under way. A place without is free.
class Places {
 public:
  explicit Places(int64_t count) { grow(std::max<int64_t>(count, 1)); }
  int64_t count() const { return users_.size(); }

  void grow(int64_t count) {
    const int64_t before = users_.size();
    users_.resize(count);
    free_.resize((count + 63) / 64);
    for (int64_t place = std::max<int64_t>(before, 1); place < count; ++place) mark(place, true);  // 0 is the head
  }
  void hold(uint32_t place) {
    check(users_[place] < UINT16_MAX, "block_io: too many maps are kept");
    if (users_[place]++ == 0) mark(place, false);
  }
  void release(uint32_t place) {
    check(users_[place] > 0, "block_io: a map is dropped that was not kept");
    if (--users_[place] == 0) mark(place, true);
  }
  // Takes the next free place behind the last one, so that blocks that are written together lie together. 0: none.
  uint32_t take() {
    if (free_count_ == 0) return 0;
    while (free_[word_] == 0) word_ = word_ + 1 == free_.size() ? 0 : word_ + 1;
    const uint32_t place = word_ * 64 + __builtin_ctzll(free_[word_]);
    hold(place);
    return place;
  }
  bool is_free(int64_t place) const { return place < count() && free_[place / 64] >> place % 64 & 1; }

 private:
  std::vector<uint16_t> users_;
  std::vector<uint64_t> free_;  // a bit for each place
  size_t word_ = 0;
  int64_t free_count_ = 0;

  void mark(int64_t place, bool is_free) {
    free_[place / 64] ^= uint64_t{1} << place % 64;  // it was the other
    free_count_ += is_free ? 1 : -1;
  }
};

// Records that wait, in chains of a block. Chains are named by their first node.
class Waiting {
 public:
  static constexpr uint32_t kNone = UINT32_MAX;
  struct Node {
    uint32_t next, record;  // which record of its block
  };
  explicit Waiting(int64_t record_bytes) : record_bytes_(record_bytes) {}

  int64_t count() const { return count_; }
  uint8_t* bytes(uint32_t node) { return bytes_.data() + node * record_bytes_; }
  const Node& operator[](uint32_t node) const { return nodes_[node]; }

  uint32_t find(uint32_t chain, uint32_t record) const {
    while (chain != kNone && nodes_[chain].record != record) chain = nodes_[chain].next;
    return chain;
  }
  // Returns the node of a record in a chain, a new one at its beginning if there was none.
  uint32_t place_for(uint32_t* chain, uint32_t record) {
    const uint32_t found = find(*chain, record);
    if (found != kNone) return found;
    uint32_t node = free_;
    if (node == kNone) {
      node = nodes_.size();
      nodes_.emplace_back();
      bytes_.resize(bytes_.size() + record_bytes_);
    } else {
      free_ = nodes_[node].next;
    }
    nodes_[node] = {*chain, record};
    ++count_;
    return *chain = node;
  }
  void forget(uint32_t chain) {
    while (chain != kNone) {
      const uint32_t next = nodes_[chain].next;
      nodes_[chain].next = free_;
      free_ = chain;
      chain = next;
      --count_;
    }
  }

 private:
  int64_t record_bytes_, count_ = 0;
  uint32_t free_ = kNone;
  std::vector<Node> nodes_;
  std::vector<uint8_t> bytes_;
};

INLINE uint64_t splitmix64(uint64_t x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
  x = (x ^ x >> 27) * 0x94D049BB133111EB;
  return x ^ x >> 31;
}

// The sum of mixed words. Compilers make vectors of the inner loop, because its length is fixed.
template <class Key>
INLINE uint64_t sum_of(const uint64_t* words, int64_t begin, int64_t end, const Key& key) {
  constexpr int kLanes = 16;
  uint64_t sums[kLanes] = {}, sum = 0;
  for (; begin + kLanes <= end; begin += kLanes)
    for (int j = 0; j < kLanes; ++j) sums[j] += splitmix64(words[begin + j] ^ key(begin + j));
  for (; begin < end; ++begin) sum += splitmix64(words[begin] ^ key(begin));
  for (const uint64_t lane : sums) sum += lane;
  return sum;
}

FOR_PROCESSORS static uint64_t checksum(const uint64_t* words, const uint64_t* keys, int64_t count) {
  return sum_of(words, 1, count, [=](int64_t i) __attribute__((always_inline)) { return keys[i]; });
}

// `mixed_sum` of layout.py.
FOR_PROCESSORS static uint64_t mixed_sum(const uint64_t* words, uint64_t first, int64_t count) {
  return sum_of(words, 0, count, [=](int64_t i) __attribute__((always_inline)) { return splitmix64(first + i); });
}

struct Shape {
  int64_t fd, file, block, per_block, start, rows, bytes_queue, places, step;
};

class Store {
 public:
  Store(const Shape& shape, std::vector<int64_t> fields, const int32_t* places, const int32_t* generations)
      : shape_(shape), fields_(std::move(fields)), waiting_(record_bytes()), file_(shape.places) {
    const int64_t blocks = (shape.rows + shape.per_block - 1) / shape.per_block;
    places_.assign(places, places + blocks);
    generations_.assign(generations, generations + blocks);
    for (uint32_t place : places_)
      if (place) file_.hold(place);
    for (int64_t i = 0; i < shape.block / 8; ++i) keys_.push_back(splitmix64(i + shape.file));
    most_run_ = std::min(kMostRun, kMostBlock / shape.block);
    most_ = std::max<int64_t>(shape.bytes_queue / (record_bytes() + kBeside), 1);
  }

  int64_t record_bytes() const {
    int64_t bytes = 0;
    for (int64_t field : fields_) bytes += field;
    return bytes;
  }
  const Shape& shape() const { return shape_; }
  const std::vector<int64_t>& fields() const { return fields_; }

  // Takes from the queue what is there, and adds a read for each other block to `reads`.
  void fetch(Reading* reading, int64_t count, std::deque<Op>* reads) {
    for (int64_t u = 0, end; u < count; u = end) {
      const uint32_t block = reading->rows[u] / shape_.per_block;
      const int64_t first = block * shape_.per_block;
      end = u + 1;
      while (end < count && reading->rows[end] < first + shape_.per_block) ++end;
      const uint32_t newer = chain_of(queued_, block), older = chain_of(written_, block);
      bool is_read = false;
      for (int64_t i = u; i < end; ++i) {
        const uint32_t record = reading->rows[i] - first;
        uint32_t node = waiting_.find(newer, record);
        if (node == Waiting::kNone) node = waiting_.find(older, record);
        if (node != Waiting::kNone) {
          scatter(waiting_.bytes(node), *reading, i);
          reading->is_taken[i] = 1;
          ++rows_from_queue;
        } else if (places_[block] == 0) {
          reading->never[i] = true;
        } else {
          is_read = true;
        }
      }
      if (!is_read) continue;
      file_.hold(places_[block]);  // nothing is written there until it is read
      ++reading->open;
      Op* const before = reads->empty() ? nullptr : &reads->back();
      if (before && before->reading == reading && before->count < most_run_ &&
          before->place + before->count == places_[block]) {
        before->of[before->count++] = {block, generations_[block]};
        before->last = end;
      } else {
        reads->push_back({this, reading, u, end, false, places_[block], 1, {{block, generations_[block]}}});
      }
    }
  }

  bool has_room(int64_t rows) const { return waiting_.count() == 0 || waiting_.count() + rows <= most_; }

  void put(const int64_t* rows, const std::vector<Field>& fields, int64_t count) {
    for (int64_t u = 0; u < count; ++u) {
      const uint32_t block = rows[u] / shape_.per_block;
      uint32_t* chain = &queued_.try_emplace(block, Waiting::kNone).first->second;
      uint8_t* to = waiting_.bytes(waiting_.place_for(chain, rows[u] - block * shape_.per_block));
      for (const Field& field : fields) {
        memcpy(to, field.to + u * field.bytes, field.bytes);
        to += field.bytes;
      }
    }
  }

  bool is_empty() const { return waiting_.count() == 0; }
  bool is_writing() const { return !written_.empty(); }
  bool is_due() const { return !error.kind && !queued_.empty() && (is_flushed || 2 * waiting_.count() > most_); }

  // Begins to write the next block that waits: to read it first, if it has records that do not wait. Those that follow
  // are written with it where nothing has to be read. Returns false if there is none, or if the file cannot grow.
  bool next_write(Op* op, uint8_t* buffer) {
    auto it = queued_.lower_bound(cursor_);
    for (size_t tried = 0;; ++tried, ++it) {
      if (tried > written_.size()) return false;
      if (it == queued_.end()) it = queued_.begin();
      if (!written_.count(it->first)) break;
    }
    const bool is_read = has_others(*it);
    *op = {this, nullptr, 0, 0, false, places_[it->first], 1, {{it->first, generations_[it->first]}}};
    it = begin_write(it);
    if (is_read) return true;
    memset(buffer, 0, shape_.block);
    if (!make_write(op, buffer)) return false;
    while (it != queued_.end() && op->count < most_run_) {
      const uint32_t block = it->first;
      if (written_.count(block) || has_others(*it) || !file_.is_free(op->place + op->count)) break;
      it = begin_write(it);
      file_.hold(op->place + op->count);
      op->of[op->count] = {block, generations_[block]};
      memset(buffer + op->count * shape_.block, 0, shape_.block);
      fill(op, op->count++, buffer);
    }
    return true;
  }

  // What follows a read, without the lock: checks the blocks, and copies the rows of a fetch. result: the last one.
  Error work(const Op& op, const uint8_t* buffer, int64_t result) const {
    const int64_t whole = op.done / shape_.block;
    if (whole < op.count) {  // the others are lost with the first that is
      const int64_t kind = op.is_write ? kWrite : result < 0 ? kRead : kShort;
      return {kind, result < 0 ? -result : kind == kWrite ? ENOSPC : 0, op.of[whole].block, op.place + whole};
    }
    if (op.is_write) return {};
    for (int64_t i = 0; i < op.count; ++i) {
      const Error found = checked(op, i, buffer + i * shape_.block);
      if (found.kind) return found;
    }
    if (op.reading) scatter_blocks(op, buffer);
    return {};
  }

  // Returns whether the op goes on: a block was read and is now to be written.
  bool finish(Op* op, uint8_t* buffer, const Error& found) {
    if (op->reading) {
      blocks_read += op->count;
      for (uint32_t i = 0; i < op->count; ++i) file_.release(op->place + i);
      if (found.kind) op->reading->error = found;
      op->reading->open -= op->count;
      return false;
    }
    if (!op->is_write) {
      ++blocks_read;
      if (!found.kind) return make_write(op, buffer);
      wait_again(op->of[0].block, found);
      return false;
    }
    for (uint32_t i = 0; i < op->count; ++i) {
      const auto [block, generation] = op->of[i];
      if (found.kind) {
        file_.release(op->place + i);
        wait_again(block, found);
        continue;
      }
      ++blocks_written;
      if (places_[block]) file_.release(places_[block]);
      places_[block] = op->place + i;
      generations_[block] = generation;
      const auto it = written_.find(block);
      waiting_.forget(it->second);
      written_.erase(it);
    }
    return false;
  }

  void map(int32_t* places, int32_t* generations) const {
    std::copy(places_.begin(), places_.end(), places);
    std::copy(generations_.begin(), generations_.end(), generations);
  }
  // Gives the rows that wait and their records, each once.
  void waiting(std::vector<int64_t>* rows, std::vector<uint8_t>* records) {
    for (const auto& [block, chain] : queued_) add_waiting(block, chain, Waiting::kNone, rows, records);
    for (const auto& [block, chain] : written_) add_waiting(block, chain, chain_of(queued_, block), rows, records);
  }
  void use(const int32_t* places, int64_t count, bool is_kept) {
    for (int64_t k = 0; k < count; ++k) {
      if (places[k] == 0) continue;
      if (is_kept) file_.hold(places[k]);
      else file_.release(places[k]);
    }
  }

  // Adds the rows of [first, last) that were perhaps put: all of a block of which one was.
  void known(int64_t first, int64_t last, std::vector<int64_t>* rows) const {
    for (int64_t block = first / shape_.per_block; block * shape_.per_block < last; ++block) {
      if (is_new(block)) continue;
      const int64_t end = std::min(last, (block + 1) * shape_.per_block);
      for (int64_t row = std::max(first, block * shape_.per_block); row < end; ++row) rows->push_back(row);
    }
  }

  // -- blocks that are written whole, beside the queue --

  bool is_new(uint32_t block) const {
    constexpr uint32_t kNone = Waiting::kNone;
    return places_[block] == 0 && chain_of(queued_, block) == kNone && chain_of(written_, block) == kNone;
  }

  // Makes a new block of records, which lie in `from` from `first` on. Those of which all bytes are 0 are left out.
  // Returns its generation, 0 if there are no others. It needs no lock.
  uint32_t compose(uint32_t block, const std::vector<Field>& from, int64_t first, uint8_t* content) const {
    memset(content, 0, shape_.block);
    bool is_empty = true;
    uint8_t* record = content + shape_.start;
    for (int64_t r = 0, count = records_of(block); r < count; ++r) {
      uint8_t all = 0;
      for (const Field& field : from) {
        const uint8_t* const entries = field.to + (first + r) * field.bytes;
        for (int64_t i = 0; i < field.bytes; ++i) all |= entries[i];
        memcpy(record, entries, field.bytes);
        record += field.bytes;
      }
      if (all == 0) continue;
      content[16 + r / 8] |= 1 << r % 8;
      is_empty = false;
    }
    return is_empty ? 0 : seal(content, block, 0);
  }

  // Takes a place of the file. Returns errno, 0 if all went well.
  int take(uint32_t* place) {
    if ((*place = file_.take())) return 0;
    const int code = grow();
    if (code == 0) *place = file_.take();
    return code;
  }
  void give_back(uint32_t place) { file_.release(place); }
  void took(uint32_t block, uint32_t place, uint32_t generation) {
    places_[block] = place;
    generations_[block] = generation;
    ++blocks_written;
  }

  Error error;              // of the last write; nothing is written until a call takes it away
  bool is_flushed = false;  // whether all that waits is to be written, not only half
  int64_t under_way = 0;
  int64_t blocks_read = 0, blocks_written = 0, rows_from_queue = 0;
  std::unordered_map<int64_t, std::unique_ptr<Reading>> readings;  // by ticket

 private:
  static constexpr int64_t kBeside = 8 + 48;  // bytes of a node, and of an entry of the map of blocks
  static constexpr int64_t kGrowth = 64 << 20;

  Shape shape_;
  std::vector<int64_t> fields_;
  std::vector<uint64_t> keys_;
  std::vector<uint32_t> places_, generations_;
  std::map<uint32_t, uint32_t> queued_;             // block -> chain
  std::unordered_map<uint32_t, uint32_t> written_;  // those whose block is being written
  Waiting waiting_;
  Places file_;
  int64_t most_, most_run_;
  uint32_t cursor_ = 0;
  using Queued = std::map<uint32_t, uint32_t>::iterator;

  int64_t records_of(uint32_t block) const {
    return std::min(shape_.per_block, shape_.rows - block * shape_.per_block);
  }

  template <class Chains>
  static uint32_t chain_of(const Chains& chains, uint32_t block) {
    if (chains.empty()) return Waiting::kNone;
    const auto it = chains.find(block);
    return it == chains.end() ? Waiting::kNone : it->second;
  }

  static void scatter(const uint8_t* record, const Reading& reading, int64_t u) {
    for (const Field& field : reading.into) {
      memcpy(field.to + reading.at[u] * field.bytes, record, field.bytes);
      record += field.bytes;
    }
  }

  void add_waiting(uint32_t block, uint32_t chain, uint32_t newer, std::vector<int64_t>* rows,
                   std::vector<uint8_t>* records) {
    for (uint32_t node = chain; node != Waiting::kNone; node = waiting_[node].next) {
      if (waiting_.find(newer, waiting_[node].record) != Waiting::kNone) continue;
      rows->push_back(block * shape_.per_block + waiting_[node].record);
      records->insert(records->end(), waiting_.bytes(node), waiting_.bytes(node) + record_bytes());
    }
  }

  Error checked(const Op& op, int64_t i, const uint8_t* content) const {
    const uint64_t* words = reinterpret_cast<const uint64_t*>(content);
    const auto [block, generation] = op.of[i];
    if (words[0] != checksum(words, keys_.data(), shape_.block / 8)) return {kChecksum, 0, block, op.place + i};
    uint32_t head[2];
    memcpy(head, content + 8, sizeof head);
    if (head[0] == block && head[1] == generation) return {};
    return {kOther, 0, block, op.place + i, head[0], head[1], generation};
  }

  void scatter_blocks(const Op& op, const uint8_t* buffer) const {
    const int64_t bytes = record_bytes();
    uint32_t i = 0;
    for (int64_t u = op.first; u < op.last; ++u) {
      const int64_t row = op.reading->rows[u];
      while (i + 1 < op.count && row >= op.of[i + 1].block * shape_.per_block) ++i;
      const int64_t record = row - op.of[i].block * shape_.per_block;
      if (op.reading->is_taken[u] || record >= shape_.per_block) continue;  // or of a block that nobody wrote
      const uint8_t* const content = buffer + i * shape_.block;
      if (content[16 + record / 8] >> record % 8 & 1) scatter(content + shape_.start + record * bytes, *op.reading, u);
      else op.reading->never[u] = true;
    }
  }

  // Whether a block has records that do not wait.
  bool has_others(const std::pair<const uint32_t, uint32_t>& queued) const {
    if (places_[queued.first] == 0) return false;
    int64_t count = 0;
    for (uint32_t node = queued.second; node != Waiting::kNone; node = waiting_[node].next) ++count;
    return count < records_of(queued.first);
  }

  Queued begin_write(Queued it) {
    written_[it->first] = it->second;
    cursor_ = it->first + 1;
    return queued_.erase(it);
  }

  // Puts the records that wait into the block in the buffer, and takes a place for it.
  bool make_write(Op* op, uint8_t* buffer) {
    op->is_write = true;
    op->done = 0;
    if (const int code = take(&op->place)) {
      wait_again(op->of[0].block, {kWrite, code, op->of[0].block});
      return false;
    }
    fill(op, 0, buffer);
    return true;
  }

  void fill(Op* op, int64_t i, uint8_t* buffer) {
    uint8_t* const content = buffer + i * shape_.block;
    const int64_t bytes = record_bytes();
    for (uint32_t node = written_.at(op->of[i].block); node != Waiting::kNone; node = waiting_[node].next) {
      const uint32_t record = waiting_[node].record;
      content[16 + record / 8] |= 1 << record % 8;
      memcpy(content + shape_.start + record * bytes, waiting_.bytes(node), bytes);
    }
    op->of[i].generation = seal(content, op->of[i].block, op->of[i].generation);
  }

  // Writes what a block says of itself. Returns its new generation.
  uint32_t seal(uint8_t* content, uint32_t block, uint32_t before) const {
    const uint32_t head[2] = {block, static_cast<uint32_t>((before + shape_.step) & 0x7fffffff)};
    memcpy(content + 8, head, sizeof head);
    uint64_t* words = reinterpret_cast<uint64_t*>(content);
    words[0] = checksum(words, keys_.data(), shape_.block / 8);
    return head[1];
  }

  // Lengthens the file by an eighth, at most 64 MiB. Returns errno, 0 if all went well.
  int grow() {
    const int64_t most = kGrowth / shape_.block, now = file_.count();
    int code = 0;
    for (const int64_t more : {std::clamp<int64_t>(now / 8, 16, most), int64_t{1}}) {
      const int64_t size = (now + more) * shape_.block;
#if defined(__linux__)
      code = fallocate(shape_.fd, 0, now * shape_.block, more * shape_.block) ? errno : 0;
      if (code == EOPNOTSUPP)
#endif
        code = ftruncate(shape_.fd, size) ? errno : 0;
      if (code == 0) {
        file_.grow(now + more);
        return 0;
      }
    }
    return code;
  }

  // The records of a block that could not be written wait again, behind what was put since.
  void wait_again(uint32_t block, const Error& found) {
    const auto it = written_.find(block);
    uint32_t* chain = &queued_.try_emplace(block, Waiting::kNone).first->second;
    for (uint32_t node = it->second; node != Waiting::kNone; node = waiting_[node].next)
      if (waiting_.find(*chain, waiting_[node].record) == Waiting::kNone) {
        const std::vector<uint8_t> record(waiting_.bytes(node), waiting_.bytes(node) + record_bytes());
        std::copy(record.begin(), record.end(), waiting_.bytes(waiting_.place_for(chain, waiting_[node].record)));
      }
    waiting_.forget(it->second);
    written_.erase(it);
    error = found;
  }
};

}  // namespace sparrow::block_io
