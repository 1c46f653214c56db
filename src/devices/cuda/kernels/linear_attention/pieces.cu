
// ---- Gradients of queries, keys and factors, from states and from what the passes over positions have left. ----
//
// In a piece of up to 32 positions, P_t is the product of alpha up to t, D_tj that of those behind j up to t, and E_j that
// of all behind j. With the errors r, delta = beta r, the gradients e of delta, S the state in front of the piece and dS the
// gradient of that behind it:
//   dq_t = P_t S^T dy_t + sum over j <= t of X_tj k_j,          with X_tj = D_tj dy_t . delta_j
//   dk_t = -P_t beta_t S^T e_t + E_t dS^T delta_t + sum over u >= t of X_ut q_u
//          - sum over j < t of Z_tj k_j - sum over u > t of Z_ut k_u, with Z_tj = D_tj beta_t e_t . delta_j
//   dbeta_t = e_t . r_t.
// The gradient of ln alpha_l is the sum of all that passes position l: of products of the terms above with q_t and k_t.

constexpr int PIECE = 32, TILE_STRIDE = 36;

// 32 channels or keys by 32 positions, whose rows lie so that reads of four neighbours have no conflict.
struct alignas(16) Tile {
    float of[WARP][TILE_STRIDE];
};

// Values of a warp's four positions.
__device__ inline Four of_positions(const float* row) { return read_as<true>(row + 4 * (threadIdx.x / WARP), 4); }

// Reads `width` columns of a piece's rows, which lie `stride` apart, to (columns, positions); zeros outside.
template <class E>
__device__ inline void stage_tile(Tile& tile, const E* from, long long stride, int positions, int width,
                                  const float* factors = nullptr) {
    const int lane = threadIdx.x % WARP;
    for (int at = threadIdx.x / WARP; at < PIECE; at += blockDim.x / WARP) {
        const bool is_there = at < positions && lane < width;
        tile.of[lane][at] = is_there ? get(from[at * stride + lane]) * (factors == nullptr ? 1.0f : factors[at]) : 0.0f;
    }
}

// What a block of a piece reads.
struct Piece {
    long long row; // its first row
    int first, rows; // its first position in the segment, and its positions
    long long of_segment; // its first row of tensors of the segment
};

struct Shared {
    Tile a, b, c;
    // (t, j): X; Z; the part of the pair t, j of gradients of ln alpha.
    float x[PIECE][TILE_STRIDE], z[PIECE][TILE_STRIDE], pairs[PIECE][TILE_STRIDE];
    float alpha[PIECE], beta[PIECE], dbeta[PIECE]; // alpha is 0 at the first position of a document
    float lengths[2][PIECE]; // factors of queries and of keys
    float from_begin[PIECE], to_end[PIECE]; // P, E
    float before[PIECE], behind[PIECE]; // the parts of P_t and of E_t of gradients of ln alpha
    float states; // that of the product of all alphas
};

// Factors, and products of alphas.
__device__ inline void begin_piece(Shared& shared, const Piece& piece, const Rule& rule, int head, const Linear& size) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    for (int index = warp; index < 2 * PIECE; index += blockDim.x / WARP) {
        const int at = index / 2, is_key = index % 2;
        float factor = 0.0f;
        if (at < piece.rows) {
            const T* const x = rule.x + (piece.row + at) * size.mixed() + query_column(head, size);
            factor = inverse_length(x + is_key * size.keys(), size.key_size) * (is_key ? 1.0f : query_scale(size));
        }
        if (lane == 0) {
            shared.lengths[is_key][at] = factor;
        }
    }
    if (threadIdx.x < PIECE) {
        const bool is_there = lane < piece.rows;
        const Factors factors = is_there ? factors_of(rule, piece.row + lane, head, size) : Factors{};
        shared.alpha[lane] = is_there ? decay_of(rule, factors, piece.row + lane, size) : 1.0f;
        shared.beta[lane] = factors.beta;
    }
    __syncthreads();
    if (threadIdx.x < PIECE) {
        float from_begin = 1.0f, to_end = 1.0f;
        for (int at = 0; at < PIECE; ++at) {
            from_begin *= at <= lane ? shared.alpha[at] : 1.0f;
            to_end *= at > lane ? shared.alpha[at] : 1.0f;
        }
        shared.from_begin[lane] = from_begin;
        shared.to_end[lane] = to_end;
    }
}

// X, Z and the pairs' parts of the gradients of ln alpha. A thread has four t and one j.
__device__ inline void multiply_pairs(Shared& shared, const Piece& piece, const float* errors, const float* slopes,
                                      const T* dy, const Rule& rule, int head, const Linear& size) {
    const int warp = threadIdx.x / WARP, j = threadIdx.x % WARP;
    Four x = {}, z = {}, by_query = {}, by_key = {};
    for (int first = 0; first < size.value_size; first += WARP) {
        const int width = size.value_size - first;
        const long long column = head * size.value_size + first, at = piece.of_segment * size.values() + column;
        __syncthreads();
        stage_tile(shared.a, dy + piece.row * size.values() + column, size.values(), piece.rows, width);
        stage_tile(shared.b, slopes + at, size.values(), piece.rows, width);
        stage_tile(shared.c, errors + at, size.values(), piece.rows, width);
        __syncthreads();
        for (int channel = 0; channel < WARP; ++channel) {
            const Four d = of_positions(shared.a.of[channel]), slope = of_positions(shared.b.of[channel]);
            const float error = shared.c.of[channel][j];
            for (int i = 0; i < 4; ++i) {
                x.of[i] = fmaf(d.of[i], error, x.of[i]);
                z.of[i] = fmaf(slope.of[i], error, z.of[i]);
            }
        }
    }
    for (int first = 0; first < size.key_size; first += WARP) {
        const T* const from = rule.x + piece.row * size.mixed() + query_column(head, size) + first;
        const int width = size.key_size - first;
        __syncthreads();
        stage_tile(shared.a, from, size.mixed(), piece.rows, width, shared.lengths[0]);
        stage_tile(shared.b, from + size.keys(), size.mixed(), piece.rows, width, shared.lengths[1]);
        __syncthreads();
        for (int key = 0; key < WARP; ++key) {
            const Four q = of_positions(shared.a.of[key]), k = of_positions(shared.b.of[key]);
            const float other = shared.b.of[key][j];
            for (int i = 0; i < 4; ++i) {
                by_query.of[i] = fmaf(q.of[i], other, by_query.of[i]);
                by_key.of[i] = fmaf(k.of[i], other, by_key.of[i]);
            }
        }
    }
    for (int i = 0; i < 4; ++i) {
        const int t = 4 * warp + i;
        float decay = j <= t ? shared.beta[j] : 0.0f;
        for (int at = j + 1; at <= t; ++at) {
            decay *= shared.alpha[at];
        }
        if (j == t) {
            shared.dbeta[t] = z.of[i];
        }
        const float of_query = decay * x.of[i], of_key = j < t ? decay * shared.beta[t] * z.of[i] : 0.0f;
        shared.x[t][j] = of_query;
        shared.z[t][j] = of_key;
        shared.pairs[t][j] = j < t ? of_query * by_query.of[i] - of_key * by_key.of[i] : 0.0f;
    }
}

// A warp's four positions of one key: products with states.
struct OfStates {
    Four by_output, by_slope, by_error; // S^T dy, S^T e, dS^T r
};

// A thread's key begins `states` and `dstates`, or there is none: null. Adds to `product` that of S and dS, of a share.
__device__ inline OfStates multiply_states(Shared& shared, const Piece& piece, const float* states,
                                           const float* dstates, const float* errors, const float* slopes, const T* dy,
                                           int head, float& product, const Linear& size) {
    OfStates sums = {};
    for (int first = 0; first < size.value_size; first += WARP) {
        const int width = size.value_size - first;
        const long long column = head * size.value_size + first, at = piece.of_segment * size.values() + column;
        __syncthreads();
        stage_tile(shared.a, dy + piece.row * size.values() + column, size.values(), piece.rows, width);
        stage_tile(shared.b, slopes + at, size.values(), piece.rows, width);
        stage_tile(shared.c, errors + at, size.values(), piece.rows, width);
        __syncthreads();
        for (int channel = 0; channel < min(WARP, width) && states != nullptr; ++channel) {
            const long long of_key = static_cast<long long>(first + channel) * size.key_size;
            const float state = states[of_key], dstate = dstates[of_key];
            const Four d = of_positions(shared.a.of[channel]), slope = of_positions(shared.b.of[channel]);
            const Four error = of_positions(shared.c.of[channel]);
            for (int i = 0; i < 4; ++i) {
                sums.by_output.of[i] = fmaf(d.of[i], state, sums.by_output.of[i]);
                sums.by_slope.of[i] = fmaf(slope.of[i], state, sums.by_slope.of[i]);
                sums.by_error.of[i] = fmaf(error.of[i], dstate, sums.by_error.of[i]);
            }
            // Each warp has a share of the channels.
            product += channel % 8 == static_cast<int>(threadIdx.x / WARP) ? state * dstate : 0.0f;
        }
    }
    return sums;
}

// Of a warp's four positions of one key: what pairs of positions add to dq and dk. a and b: queries and keys.
__device__ inline void add_pairs(const Shared& shared, Four& dq, Four& dk) {
    const int first = 4 * (threadIdx.x / WARP), lane = threadIdx.x % WARP;
    for (int from = 0; from < PIECE; from += 4) {
        const Four q = read_as<true>(&shared.a.of[lane][from], 4), k = read_as<true>(&shared.b.of[lane][from], 4);
        for (int i = 0; i < 4; ++i) {
            const Four x = read_as<true>(&shared.x[first + i][from], 4);
            const Four z = read_as<true>(&shared.z[first + i][from], 4);
            for (int other = 0; other < 4; ++other) {
                dq.of[i] = fmaf(x.of[other], k.of[other], dq.of[i]);
                dk.of[i] = fmaf(-z.of[other], k.of[other], dk.of[i]);
            }
        }
        for (int other = 0; other < 4; ++other) {
            const Four x = of_positions(shared.x[from + other]), z = of_positions(shared.z[from + other]);
            for (int i = 0; i < 4; ++i) {
                dk.of[i] = fmaf(x.of[i], q.of[other], dk.of[i]);
                dk.of[i] = fmaf(-z.of[i], k.of[other], dk.of[i]);
            }
        }
    }
}

// The gradients of the logits of beta and of the steps, and their sums over the piece. The first warp.
__device__ inline void end_piece(Shared& shared, const Piece& piece, T* dprojected, float* parts, const Rule& rule,
                                 int head, const Linear& size) {
    const int lane = threadIdx.x;
    float sum = 0.0f;
    for (int j = 0; j < PIECE; ++j) { // of all pairs with j before l, in place
        const float pair = shared.pairs[lane][j];
        shared.pairs[lane][j] = sum;
        sum += pair;
    }
    __syncwarp();
    float dlog = shared.states, dstep = 0.0f, of_rate = 0.0f;
    for (int at = 0; at < PIECE; ++at) {
        dlog += at < lane ? shared.behind[at] : shared.before[at] + shared.pairs[at][lane];
    }
    if (lane < piece.rows) {
        const Factors factors = factors_of(rule, piece.row + lane, head, size);
        dstep = -dlog * factors.rate * sigmoid(factors.step);
        of_rate = -dlog * factors.rate * factors.softplus;
        T* const to = dprojected + (piece.row + lane) * size.projected() + size.mixed();
        set(to[head], shared.dbeta[lane] * factors.beta * (1.0f - factors.beta));
        set(to[size.value_heads + head], dstep);
    }
    of_rate = warp_sum(of_rate);
    dstep = warp_sum(dstep);
    if (lane == 0) {
        parts[head] = of_rate;
        parts[size.value_heads + head] = dstep;
    }
}

// Gradients of a piece of positions of a segment, of a head: of queries and keys as the state sees them, to of_heads, (B,
// count, H, 2, D_k); of the logits of beta and of the steps, to dprojected; and the partial sums of those of ln A and of
// the bias, (pieces, B, 2, H). states: in front of each piece; dstates: gradients of those behind; (pieces, B, H, D_v,
// D_k). errors and slopes: (B, count, H, D_v).
// launch: grid (ceil(count / 32), value_heads, sequences), block (256)
extern "C" __global__ void __launch_bounds__(256, 2)
    delta_rule_pieces(float* of_heads, T* dprojected, float* parts, const float* states, const float* dstates,
                      const float* errors, const float* slopes, const T* dy, const T* x, const T* projected,
                      const T* log, const T* bias, const int* starts, const unsigned* documents, const int* pasts,
                      int from, int count, Linear size) {
    __shared__ Shared shared;
    const Rule rule = {x, projected, log, bias, starts, documents, pasts};
    const int head = blockIdx.y, warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, first = blockIdx.x * PIECE;
    const Sequence sequence = sequence_at(starts, size.sequences, size.rows, blockIdx.z);
    const Piece piece = {sequence.first + from + first, first, min(PIECE, here(sequence, from, count) - first),
                         static_cast<long long>(sequence.index) * count + first};
    const long long index = static_cast<long long>(blockIdx.x) * size.sequences + blockIdx.z;
    parts += index * 2 * size.value_heads;
    if (piece.rows <= 0) {
        if (threadIdx.x < 2) {
            parts[threadIdx.x * size.value_heads + head] = 0.0f;
        }
        return;
    }
    begin_piece(shared, piece, rule, head, size);
    multiply_pairs(shared, piece, errors, slopes, dy, rule, head, size);

    const long long of_state = index * size.states() + static_cast<long long>(head) * size.value_size * size.key_size;
    float product = 0.0f;
    Four before = {}, behind = {};
    for (int first_key = 0; first_key < size.key_size; first_key += WARP) {
        const int width = size.key_size - first_key;
        const bool is_mine = lane < width;
        const OfStates sums = multiply_states(shared, piece, is_mine ? states + of_state + first_key + lane : nullptr,
                                              dstates + of_state + first_key + lane, errors, slopes, dy, head, product,
                                              size);
        const T* const queries = x + piece.row * size.mixed() + query_column(head, size) + first_key;
        __syncthreads();
        stage_tile(shared.a, queries, size.mixed(), piece.rows, width, shared.lengths[0]);
        stage_tile(shared.b, queries + size.keys(), size.mixed(), piece.rows, width, shared.lengths[1]);
        __syncthreads();
        Four dq, dk;
        const Four q = of_positions(shared.a.of[lane]), k = of_positions(shared.b.of[lane]);
        for (int i = 0; i < 4; ++i) {
            const int t = 4 * warp + i;
            const float beta = shared.beta[t], decay = shared.from_begin[t];
            const float of_slope = -decay * beta * sums.by_slope.of[i];
            const float of_error = shared.to_end[t] * beta * sums.by_error.of[i];
            dq.of[i] = decay * sums.by_output.of[i];
            dk.of[i] = of_slope + of_error;
            before.of[i] += dq.of[i] * q.of[i] + of_slope * k.of[i];
            behind.of[i] += of_error * k.of[i];
        }
        add_pairs(shared, dq, dk);
        for (int i = 0; i < 4; ++i) {
            const int t = 4 * warp + i;
            float* const to = of_heads + ((piece.of_segment + t) * size.value_heads + head) * 2 * size.key_size;
            if (t < piece.rows && is_mine) {
                to[first_key + lane] = dq.of[i];
                to[size.key_size + first_key + lane] = dk.of[i];
            }
        }
    }
    for (int i = 0; i < 4; ++i) {
        const float of_before = warp_sum(before.of[i]), of_behind = warp_sum(behind.of[i]);
        if (lane == 0) {
            shared.before[4 * warp + i] = of_before;
            shared.behind[4 * warp + i] = of_behind;
        }
    }
    product = block_sum(product);
    if (threadIdx.x == 0) {
        shared.states = shared.from_begin[PIECE - 1] * product;
    }
    __syncthreads();
    if (warp == 0) {
        end_piece(shared, piece, dprojected, parts, rule, head, size);
    }
}

// The gradients of queries and keys on the positions of a segment, to the first 2 G D_k columns of dx, from those of the
// heads of values that each of them serves. A warp has a query or a key.
// launch: grid (ceil(sequences count 2 key_heads / 8)), block (256)
extern "C" __global__ void delta_rule_rows(T* dx, const T* x, const float* of_heads, const int* starts, int from,
                                           int count, Linear size) {
    const int heads = 2 * size.key_heads, channels = size.key_size, serves = size.value_heads / size.key_heads;
    const long long index = static_cast<long long>(blockIdx.x) * HEADS_A_BLOCK + threadIdx.x / WARP;
    const long long of_segment = index / heads;
    const int number = index % heads, is_key = number / size.key_heads, key_head = number % size.key_heads;
    if (of_segment / count >= size.sequences) {
        return;
    }
    const Sequence sequence = sequence_at(starts, size.sequences, size.rows, of_segment / count);
    const int at = of_segment % count;
    if (at >= here(sequence, from, count)) {
        return;
    }
    const long long place = (sequence.first + from + at) * static_cast<long long>(size.mixed()) + number * channels;
    x += place;
    dx += place;
    of_heads += (of_segment * size.value_heads + key_head * serves) * 2 * channels + is_key * channels;
    const auto gradient_at = [&](int column, int some) {
        Four sum = {};
        for (int head = 0; head < serves; ++head) {
            const Four d = read(of_heads + head * 2 * channels + column, some);
            for (int i = 0; i < 4; ++i) {
                sum.of[i] += d.of[i];
            }
        }
        return sum;
    };

    const float factor = inverse_length(x, channels);
    float sum = 0.0f;
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const int some = channels - column;
        const Four d = gradient_at(column, some), value = read(x + column, some);
        for (int i = 0; i < 4; ++i) {
            sum = fmaf(d.of[i], value.of[i], sum);
        }
    }
    const float along = warp_sum(sum) * factor * factor, scale = factor * (is_key ? 1.0f : query_scale(size));
    for (int column = 4 * (threadIdx.x % WARP); column < channels; column += 4 * WARP) {
        const int some = channels - column;
        const Four value = read(x + column, some);
        Four d = gradient_at(column, some);
        for (int i = 0; i < 4; ++i) {
            d.of[i] = scale * (d.of[i] - value.of[i] * along);
        }
        write(dx + column, d, some);
    }
}
