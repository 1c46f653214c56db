// The KV cache, and attention to it: for generation, where a few tokens come at a time.

constexpr int HEAD_LIMIT = 512;
constexpr int WARPS = 8;

// Copies keys and values of each position, which are the last `width` of `packed` channels. y: (rows, width).
// launch: grid (rows, ceil(width / 1024)), block (threads(width))
extern "C" __global__ void remember(T* y, const T* qkv, long long rows, int packed, int width) {
    const int column = my_column(), count = width - column;
    if (count > 0) {
        const long long row = blockIdx.x;
        write(y + row * width + column, read(qkv + (row + 1) * packed - width + column, count), count);
    }
}

// Sums the gradients of keys and values over `shares`, and writes them beside the gradients of the queries.
// kv: (shares, rows, width).
// launch: grid (rows, ceil(width / 1024)), block (threads(width))
extern "C" __global__ void recall(T* qkv, const float* kv, long long rows, int packed, int width, int shares) {
    const int column = my_column(), count = width - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x;
    Four sum = {};
    for (int share = 0; share < shares; ++share) {
        const Four value = read(kv + (share * rows + row) * width + column, count);
        for (int i = 0; i < 4; ++i) {
            sum.of[i] += value.of[i];
        }
    }
    write(qkv + (row + 1) * packed - width + column, sum, count);
}

// The keys and values of one sequence: those of earlier positions are in the cache, the others beside their queries.
struct Remembered {
    const T* before;
    const T* new_ones;
    int past, width, packed;

    __device__ const T* of(int position) const {
        return position < past ? before + static_cast<long long>(position) * width
                               : new_ones + static_cast<long long>(position - past) * packed;
    }
};

template <bool PACKED>
__device__ inline float dot(const float* query, const T* key, int channels) {
    Four sum = {};
#pragma unroll 4
    for (int column = 0; column < channels; column += 4) {
        const Four q = read_as<PACKED>(query + column, channels - column);
        const Four k = read_as<PACKED>(key + column, channels - column);
        for (int i = 0; i < 4; ++i) {
            sum.of[i] += q.of[i] * k.of[i];
        }
    }
    return (sum.of[0] + sum.of[1]) + (sum.of[2] + sum.of[3]);
}

// A lane has four of every 128 channels.
constexpr int FOURS = HEAD_LIMIT / (4 * WARP);

// sum += the values of positions from..from + count, weighted by the lanes' probabilities.
template <bool PACKED>
__device__ inline void add_values(Four (&sum)[FOURS], float share, const Remembered& remembered,
                                  int of_values, int from, int count, int channels) {
#pragma unroll 4
    for (int key = 0; key < count; ++key) {
        const T* const values = remembered.of(from + key) + of_values;
        const float weight = __shfl_sync(FULL_MASK, share, key);
        for (int four = 0; four < FOURS; ++four) {
            const int column = 4 * (four * WARP + threadIdx.x % WARP);
            if (column < channels) {
                const Four value = read_as<PACKED>(values + column, channels - column);
                for (int i = 0; i < 4; ++i) {
                    sum[four].of[i] += weight * value.of[i];
                }
            }
        }
    }
}

// Causal attention of each query to the cached positions of its sequence and to the new ones, to the last `window` of
// them if that is not 0. lse: the log-sum-exps, (rows, H), sequence by sequence, head by head. y: (rows, H D); qkv: (rows, (H + 2K) D); past: (B, capacity, 2 K D); each sequence has its own
// number of cached positions. Heads have up to 512 channels.
//
// A block has one head of one row. Its warps take tiles of 32 keys in turn: each lane computes the score of one key,
// and then sums four channels of the values. The warps' results are merged in the order of the warps.
// launch: grid (rows, heads), block (256)
extern "C" __global__ void attention_to_past(T* y, float* lse, const T* qkv, const T* past, const int* starts,
                                             const int* pasts, int capacity, Attention size) {
    alignas(16) __shared__ float query[HEAD_LIMIT], sums[WARPS][HEAD_LIMIT];
    __shared__ float mosts[WARPS], totals[WARPS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const long long row = blockIdx.x;
    const Sequence sequence = sequence_of(starts, size.sequences, size.rows, blockIdx.x);
    const long long first_row = sequence.first;
    const int head = blockIdx.y, channels = size.head_size;
    const int width = 2 * size.kv_heads * channels, packed = size.heads * channels + width;
    const int before = pasts[sequence.index], own = before + blockIdx.x - sequence.first;
    const int first = size.window > 0 ? max(own + 1 - size.window, 0) : 0;
    const int shared_head = head * size.kv_heads / size.heads;
    const int of_keys = shared_head * channels, of_values = of_keys + size.kv_heads * channels;
    const Remembered remembered = {past + static_cast<long long>(sequence.index) * capacity * width,
                                   qkv + (first_row + 1) * packed - width, before, width, packed};
    const bool is_packed_all = are_packed(past, 4, channels) && are_packed(qkv, 4, channels);

    for (int column = threadIdx.x; column < channels; column += blockDim.x) {
        query[column] = get(qkv[row * packed + head * channels + column]);
    }
    __syncthreads();

    float most = -infinity(), total = 0.0f;
    Four sum[FOURS] = {};
    for (int tile = first + WARP * warp; tile <= own; tile += WARP * WARPS) {
        float score = -infinity();
        if (tile + lane <= own) {
            const T* const key = remembered.of(tile + lane) + of_keys;
            score = is_packed_all ? dot<true>(query, key, channels) : dot<false>(query, key, channels);
            score *= size.scale;
        }
        const float larger = fmaxf(most, warp_max(score));
        const float shrink = expf(most - larger), share = expf(score - larger);
        most = larger;
        total = total * shrink + share;
        for (Four& four : sum) {
            for (float& one : four.of) {
                one *= shrink;
            }
        }
        const int count = min(own + 1 - tile, WARP);
        if (is_packed_all) {
            add_values<true>(sum, share, remembered, of_values, tile, count, channels);
        } else {
            add_values<false>(sum, share, remembered, of_values, tile, count, channels);
        }
    }
    total = warp_sum(total);
    for (int four = 0; four < FOURS; ++four) {
        write(&sums[warp][4 * (four * WARP + lane)], sum[four], 4);
    }
    if (lane == 0) {
        mosts[warp] = most;
        totals[warp] = total;
    }
    __syncthreads();

    for (int other = 0; other < WARPS; ++other) {
        most = fmaxf(most, mosts[other]);
    }
    for (int column = threadIdx.x; column < channels; column += blockDim.x) {
        float weighted = 0.0f, all = 0.0f;
        for (int other = 0; other < WARPS; ++other) {
            const float factor = expf(mosts[other] - most);
            weighted += factor * sums[other][column];
            all += factor * totals[other];
        }
        y[(row * size.heads + head) * channels + column] = put(weighted / all);
        if (column == 0) {
            const long long of_head = first_row * size.heads + static_cast<long long>(head) * sequence.count;
            lse[of_head + row - first_row] = most + logf(all);
        }
    }
}
