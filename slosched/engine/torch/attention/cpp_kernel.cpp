// Causal attention of mixed batches over a paged KV cache, on a CPU.
//
// The work is divided into tiles: some consecutive new tokens of one sequence, for all query heads
// of some KV heads.  A tile goes through its context in pieces of a few tokens and keeps, for each
// token and query head, the largest score, the sum of the weights and the weighted sum of the
// values, as FlashAttention does.  Keys and values are read where they lie in the cache and are
// converted to float32 once for all rows of a tile.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <limits>
#include <tuple>
#include <type_traits>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/cpu/vec/functional.h>
#include <ATen/cpu/vec/vec.h>

// What Python hands over; cpp.py has the same fields in the same order.
struct Call {
  void* out;  // [tokens, query heads, head dim], contiguous
  const void* query;  // of the same shape, with the strides below
  const void* keys;  // [blocks, block size, KV heads, head dim], contiguous
  const void* values;
  const int32_t* query_starts;  // [sequences + 1]
  const int32_t* context_lens;  // [sequences]
  const int32_t* block_tables;  // [sequences, most blocks]
  int64_t num_sequences;
  int64_t most_blocks;  // in a row of `block_tables`
  int64_t block_size;
  int64_t num_heads;
  int64_t num_kv_heads;
  int64_t head_dim;
  int64_t query_token_stride;
  int64_t query_head_stride;
  int64_t window_tokens;  // the last tokens that a token sees, itself included
  double scale;
};

namespace {

using Vec = at::vec::Vectorized<float>;
constexpr int64_t kLanes = Vec::size();
constexpr int64_t kPieceTokens = 64;
constexpr int64_t kMostRows = 96;  // of a tile: products of tokens and query heads
constexpr int64_t kCacheLineBytes = 64;
constexpr int kBlockVectors = kLanes < 16 ? 2 : 4;  // so that 6 rows of them fit into registers
constexpr float kUnseen = -std::numeric_limits<float>::infinity();

int64_t rounded_up(int64_t number, int64_t multiple) {
  return (number + multiple - 1) / multiple * multiple;
}

// Products of matrices whose rows lie `step` numbers apart.

struct Matrix {
  float* numbers;
  int64_t step;
  float* at(int64_t row, int64_t column) const { return numbers + row * step + column; }
};

// Adds a[0:R, 0:depth] x b[0:depth, 0:V vectors] to c, which stays in registers meanwhile.
template <int R, int V>
void add_product_of_block(Matrix a, Matrix b, Matrix c, int64_t depth) {
  Vec sums[R][V];
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v] = Vec::loadu(c.at(r, v * kLanes));
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vec columns[V];
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) columns[v] = Vec::loadu(b.at(k, v * kLanes));
#pragma GCC unroll 6
    for (int r = 0; r < R; ++r) {
      const Vec factor(*a.at(r, k));
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = at::vec::fmadd(factor, columns[v], sums[r][v]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) sums[r][v].store(c.at(r, v * kLanes));
  }
}

template <int R>
void add_product_of_rows(Matrix a, Matrix b, Matrix c, int64_t depth, int64_t width) {
  int64_t column = 0;
  for (; column + kBlockVectors * kLanes <= width; column += kBlockVectors * kLanes) {
    add_product_of_block<R, kBlockVectors>(
        a, {b.at(0, column), b.step}, {c.at(0, column), c.step}, depth);
  }
  for (; column < width; column += kLanes) {
    add_product_of_block<R, 1>(a, {b.at(0, column), b.step}, {c.at(0, column), c.step}, depth);
  }
}

// Adds a[0:rows, 0:depth] x b[0:depth, 0:width] to c; `width` is a multiple of kLanes.
void add_product(Matrix a, Matrix b, Matrix c, int64_t rows, int64_t depth, int64_t width) {
  int64_t now;
  for (int64_t row = 0; row < rows; row += now) {
    const Matrix from{a.at(row, 0), a.step}, to{c.at(row, 0), c.step};
    now = std::min<int64_t>(rows - row, 6);
    switch (now) {
      case 1: add_product_of_rows<1>(from, b, to, depth, width); break;
      case 2: add_product_of_rows<2>(from, b, to, depth, width); break;
      case 3: add_product_of_rows<3>(from, b, to, depth, width); break;
      case 4: add_product_of_rows<4>(from, b, to, depth, width); break;
      case 5: add_product_of_rows<5>(from, b, to, depth, width); break;
      default: add_product_of_rows<6>(from, b, to, depth, width);
    }
  }
}

// Rows of the cache, the queries and the output.

template <typename T>
Vec as_float32(const T* from) {
  Vec out;
  if constexpr (std::is_same_v<T, float>) {
    out = Vec::loadu(from);
  } else {
    at::vec::load_to_float<T>(from, out);
  }
  return out;
}

// Returns the numbers from `first` on, of `count` in all; those behind the last are zero.
template <typename T>
Vec part_of_row(const T* row, int64_t first, int64_t count) {
  if (first + kLanes <= count) return as_float32(row + first);
  T rest[kLanes] = {};
  std::copy(row + first, row + count, rest);
  return as_float32(rest);
}

// Writes `count` numbers times `scale`; behind them, zeros up to a multiple of kLanes.
template <typename T>
void read_row(const T* from, float* to, int64_t count, float scale = 1) {
  for (int64_t i = 0; i < count; i += kLanes) {
    (part_of_row(from, i, count) * Vec(scale)).store(to + i);
  }
}

// Exchanges rows and columns: as many rounds of interleaving as kLanes has bits do that.
void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 4
  for (int64_t round = 1; round < kLanes; round *= 2) {
    Vec mixed[kLanes];
#pragma GCC unroll 8
    for (int64_t i = 0; i < kLanes / 2; ++i) {
      std::tie(mixed[2 * i], mixed[2 * i + 1]) =
          at::vec::interleave2(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int64_t i = 0; i < kLanes; ++i) rows[i] = mixed[i];
  }
}

template <typename T>
void prefetch_row(const T* from, int64_t count) {
  const char* bytes = reinterpret_cast<const char*>(from);
  const int64_t num_bytes = count * static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < num_bytes; i += kCacheLineBytes) __builtin_prefetch(bytes + i, 0, 2);
}

struct Tile {
  int64_t sequence;
  int64_t first_new;  // index of its first token among the new ones of the sequence
  int64_t num_tokens;
  int64_t first_kv_head;
  int64_t num_kv_heads;
};

// The tokens of a context that are computed at once: [start, start + count).
struct Piece {
  int64_t start;
  int64_t count;
};

// The buffers of one thread.  A head dimension takes `dim` numbers, a multiple of kLanes.
struct Workspace {
  Workspace(int64_t rows, int64_t dim)
      : slots(2 * kPieceTokens), queries(rows * dim), sums(rows * dim), largest(rows), totals(rows),
        scores(rows * kPieceTokens), keys(dim * kPieceTokens),
        values(kPieceTokens * dim), row(dim) {}
  std::vector<int64_t> slots;  // places in the cache of the tokens of this piece and of the next
  std::vector<float> queries, sums, largest, totals;  // a row for each token and query head
  std::vector<float> scores;  // the same, for one KV head
  std::vector<float> keys, values;  // [dim, piece], [piece, dim]
  std::vector<float> row;
};

template <typename T>
class Attention {
 public:
  explicit Attention(const Call& call)
      : call_(call), group_(call.num_heads / call.num_kv_heads),
        dim_(rounded_up(call.head_dim, kLanes)) {}

  void run() const {
    const int64_t num_threads = at::get_num_threads();
    const std::vector<Tile> tiles = divided(num_threads);
    const int64_t num_tiles = tiles.size();
    // Tiles differ in their contexts, so each thread takes the next one when it has ended one.
    std::atomic<int64_t> next{0};
    const auto work = [&](int64_t, int64_t) {
      Workspace space(std::max(kMostRows, group_), dim_);
      for (int64_t i = next++; i < num_tiles; i = next++) compute(space, tiles[i]);
    };
    at::parallel_for(0, std::min(num_threads, num_tiles), 1, work);
  }

 private:
  // A tile of few tokens takes several KV heads, so that the cache is read in the order in which
  // it lies, but leaves work for every thread.
  std::vector<Tile> divided(int64_t num_threads) const {
    const int64_t most_kv_heads = std::clamp<int64_t>(
        call_.num_sequences * call_.num_kv_heads / num_threads, 1, call_.num_kv_heads);
    std::vector<Tile> tiles;
    for (int64_t s = 0; s < call_.num_sequences; ++s) {
      const int64_t num_new = this->num_new(s);
      const int64_t tokens = std::clamp<int64_t>(kMostRows / group_, 1, num_new);
      const int64_t heads = std::clamp<int64_t>(kMostRows / (tokens * group_), 1, most_kv_heads);
      for (int64_t first = 0; first < num_new; first += tokens) {
        for (int64_t head = 0; head < call_.num_kv_heads; head += heads) {
          tiles.push_back({s, first, std::min(tokens, num_new - first), head,
                           std::min(heads, call_.num_kv_heads - head)});
        }
      }
    }
    return tiles;
  }

  int64_t num_new(int64_t s) const { return call_.query_starts[s + 1] - call_.query_starts[s]; }

  void compute(Workspace& space, const Tile& tile) const {
    const int64_t rows = tile.num_tokens * group_;  // of each KV head
    const int64_t s = tile.sequence;
    const int64_t position = call_.context_lens[s] - num_new(s) + tile.first_new;
    const int64_t end = position + tile.num_tokens;
    std::fill_n(space.sums.begin(), tile.num_kv_heads * rows * dim_, 0.f);
    std::fill_n(space.largest.begin(), tile.num_kv_heads * rows, kUnseen);
    std::fill_n(space.totals.begin(), tile.num_kv_heads * rows, 0.f);
    read_queries(space, tile);
    Piece piece{std::max<int64_t>(0, position + 1 - call_.window_tokens), 0};
    for (; piece.start < end; piece.start += piece.count) {
      piece.count = std::min(kPieceTokens, end - piece.start);
      find_slots(space, s, piece.start, end);
      for (int64_t h = 0; h < tile.num_kv_heads; ++h) {
        read_keys(space, piece.count, tile.first_kv_head + h);
        read_values(space, piece.count, tile.first_kv_head + h);
        attend(space, piece, position, h * rows, rows);
      }
    }
    write(space, tile);
  }

  // Finds where the tokens from `start` on lie, in this piece and the next; the last one is
  // repeated.
  void find_slots(Workspace& space, int64_t s, int64_t start, int64_t end) const {
    const int32_t* table = call_.block_tables + s * call_.most_blocks + start / call_.block_size;
    int64_t place = start % call_.block_size;
    for (int64_t i = 0; i < 2 * kPieceTokens; ++i) {
      space.slots[i] = *table * call_.block_size + place;
      if (start + i + 1 >= end) continue;
      if (++place == call_.block_size) {
        place = 0;
        ++table;
      }
    }
  }

  // Returns the key or value of a token of this piece, and has that of the next piece fetched.
  const T* in_cache(const Workspace& space, const void* cache, int64_t i, int64_t kv_head) const {
    const T* rows = static_cast<const T*>(cache);
    const int64_t step = call_.num_kv_heads * call_.head_dim;
    const int64_t column = kv_head * call_.head_dim;
    prefetch_row(rows + space.slots[i + kPieceTokens] * step + column, call_.head_dim);
    return rows + space.slots[i] * step + column;
  }

  void read_keys(Workspace& space, int64_t count, int64_t kv_head) const {
    for (int64_t first = 0; first < count; first += kLanes) {
      const T* keys[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        keys[i] = in_cache(space, call_.keys, first + i, kv_head);
      }
      for (int64_t column = 0; column < dim_; column += kLanes) {
        Vec part[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) part[i] = part_of_row(keys[i], column, call_.head_dim);
        transpose(part);
        float* to = space.keys.data() + column * kPieceTokens + first;
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) part[i].store(to + i * kPieceTokens);
      }
    }
  }

  void read_values(Workspace& space, int64_t count, int64_t kv_head) const {
    for (int64_t i = 0; i < count; ++i) {
      const T* value = in_cache(space, call_.values, i, kv_head);
      read_row(value, space.values.data() + i * dim_, call_.head_dim);
    }
  }

  // Adds what a piece contributes to some rows, whose first token is at `position`.
  void attend(
      Workspace& space, Piece piece, int64_t position, int64_t first_row, int64_t rows) const {
    const Matrix scores{space.scores.data(), kPieceTokens};
    const Matrix queries{space.queries.data() + first_row * dim_, dim_};
    const Matrix sums{space.sums.data() + first_row * dim_, dim_};
    const int64_t width = rounded_up(piece.count, kLanes);
    std::fill_n(scores.numbers, rows * kPieceTokens, 0.f);
    add_product(
        queries, {space.keys.data(), kPieceTokens}, scores, rows, call_.head_dim, width);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t end = position + row / group_ + 1 - piece.start;
      const int64_t from = std::clamp<int64_t>(end - call_.window_tokens, 0, piece.count);
      const int64_t to = std::clamp<int64_t>(end, 0, piece.count);
      std::fill(scores.at(row, 0), scores.at(row, from), kUnseen);
      std::fill(scores.at(row, to), scores.at(row, width), kUnseen);
      weigh(scores.at(row, 0), width, space.largest[first_row + row],
            space.totals[first_row + row], sums.at(row, 0));
    }
    add_product(scores, {space.values.data(), dim_}, sums, rows, piece.count, dim_);
  }

  // Turns the scores of a row into weights, and what it has summed up to the same scale.
  void weigh(float* scores, int64_t width, float& largest, float& total, float* sums) const {
    Vec highest(largest);
    for (int64_t i = 0; i < width; i += kLanes) {
      highest = at::vec::maximum(highest, Vec::loadu(scores + i));
    }
    const float before = largest;
    largest = at::vec::vec_reduce_all<float>(
        [](Vec x, Vec y) { return at::vec::maximum(x, y); }, highest);
    if (largest == kUnseen) {  // the row has seen nothing yet, and sees nothing here
      std::fill_n(scores, width, 0.f);
      return;
    }
    if (largest > before) {
      const float factor = std::exp(before - largest);
      total *= factor;
      for (int64_t i = 0; i < dim_; i += kLanes) {
        (Vec::loadu(sums + i) * Vec(factor)).store(sums + i);
      }
    }
    Vec weights(0.f);
    for (int64_t i = 0; i < width; i += kLanes) {
      const Vec weight = (Vec::loadu(scores + i) - Vec(largest)).exp_u20();
      weight.store(scores + i);
      weights = weights + weight;
    }
    total += at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, weights);
  }

  void read_queries(Workspace& space, const Tile& tile) const {
    const int64_t first = call_.query_starts[tile.sequence] + tile.first_new;
    float* to = space.queries.data();
    for (int64_t h = tile.first_kv_head; h < tile.first_kv_head + tile.num_kv_heads; ++h) {
      for (int64_t token = first; token < first + tile.num_tokens; ++token) {
        for (int64_t head = h * group_; head < (h + 1) * group_; ++head, to += dim_) {
          const T* from = static_cast<const T*>(call_.query) + token * call_.query_token_stride +
                          head * call_.query_head_stride;
          read_row(from, to, call_.head_dim, call_.scale);
        }
      }
    }
  }

  void write(Workspace& space, const Tile& tile) const {
    const int64_t first = call_.query_starts[tile.sequence] + tile.first_new;
    int64_t row = 0;
    for (int64_t h = tile.first_kv_head; h < tile.first_kv_head + tile.num_kv_heads; ++h) {
      for (int64_t token = first; token < first + tile.num_tokens; ++token) {
        for (int64_t head = h * group_; head < (h + 1) * group_; ++head, ++row) {
          read_row(space.sums.data() + row * dim_, space.row.data(), call_.head_dim,
                   1 / space.totals[row]);
          T* to = static_cast<T*>(call_.out) + (token * call_.num_heads + head) * call_.head_dim;
          at::vec::convert(space.row.data(), to, call_.head_dim);
        }
      }
    }
  }

  const Call& call_;
  const int64_t group_;  // number of query heads of a KV head
  const int64_t dim_;
};

}  // namespace

extern "C" {
void attend_float32(const Call* call) { Attention<float>(*call).run(); }
void attend_bfloat16(const Call* call) { Attention<c10::BFloat16>(*call).run(); }
void attend_float16(const Call* call) { Attention<c10::Half>(*call).run(); }
}
