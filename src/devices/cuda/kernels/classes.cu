// Pooling of the first or last position of each sequence, and losses of whole sequences or of tokens. Each position
// has statistics of four floats: before the loss, the fourth has the label's bits; after it, the first is the loss and
// the second is 1.

constexpr int STATISTICS = 4;

// Kinds of labels: a class, a value, or any number of labels. The last have statistics of their own, (sequences, 1 + L):
// the loss, then a number from 0 to 1 for each label. Of WEIGHED, an objective reads the one score in the place of the
// loss, and the third float of weighed statistics is its gradient.
constexpr int REGRESSION = 1, MULTI_LABEL = 2, WEIGHED = 3;

// The pooled rows of a sequence: its first (0), its last (1), or all (2).
__device__ inline Sequence pooled(Sequence sequence, int pool) {
    sequence.first += pool == 1 ? sequence.count - 1 : 0;
    sequence.count = pool == 2 ? sequence.count : 1;
    return sequence;
}

// y: (B, C), the means of the pooled rows of the sequences of x. x: (rows, C).
// launch: grid (sequences, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void pooled_rows(T* y, const T* x, const int* starts, int sequences, int rows,
                                       int channels, int pool) {
    const int column = my_column(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long sequence = blockIdx.x;
    const Sequence of = pooled(sequence_at(starts, sequences, rows, blockIdx.x), pool);
    const T* row = x + static_cast<long long>(of.first) * channels + column;
    Four sum = read(row, count);
    for (int i = 1; i < of.count; ++i) {
        row += channels;
        const Four next = read(row, count);
        for (int j = 0; j < 4; ++j) {
            sum.of[j] += next.of[j];
        }
    }
    for (int j = 0; j < 4; ++j) {
        sum.of[j] /= of.count;
    }
    write(y + sequence * channels + column, sum, count);
}

// dx: dy ÷ their number in the pooled rows, 0 in all others.
// launch: grid (rows, ceil(channels / 1024)), block (threads(channels))
extern "C" __global__ void pooled_rows_backward(T* dx, const T* dy, const int* starts, int sequences,
                                                int rows, int channels, int pool) {
    const int column = my_column(), count = channels - column;
    if (count <= 0) {
        return;
    }
    const long long row = blockIdx.x;
    const Sequence sequence = sequence_of(starts, sequences, rows, blockIdx.x);
    const T* const from = dy + static_cast<long long>(sequence.index) * channels + column;
    const Sequence of = pooled(sequence, pool);
    Four gradient = {};
    if (row >= of.first && row < of.first + of.count) {
        gradient = read(from, count);
        for (int j = 0; j < 4; ++j) {
            gradient.of[j] /= of.count;
        }
    }
    write(dx + row * channels + column, gradient, count);
}

// The largest score, and the sum of exp(score - largest).
struct Softmax {
    float most, sum;
};

__device__ inline Softmax softmax_of(const T* scores, int labels) {
    float most = -infinity();
    for (int label = threadIdx.x; label < labels; label += WARP) {
        most = fmaxf(most, get(scores[label]));
    }
    most = warp_max(most);
    float sum = 0.0f;
    for (int label = threadIdx.x; label < labels; label += WARP) {
        sum += expf(get(scores[label]) - most);
    }
    return {most, warp_sum(sum)};
}

// The row that has the label and gets the loss of this block's sample: the first row of the sequence, or the token's
// own row where `sequences` is 0.
__device__ inline long long sample_row(const int* starts, int sequences, int rows) {
    return sequences > 0 ? sequence_at(starts, sequences, rows, blockIdx.x).first : blockIdx.x;
}

// The loss of each sample: of a sequence or, where `sequences` is 0, of a row. It is written to the label's row. It is
// the squared difference of one score and a value, the cross entropy of classes (a negative class has no loss), or the
// mean over all labels of the binary cross entropy of the score's sigmoid. scores: (samples, L). own, each: label smoothing's weight of the labelled class, and that of every class.
// launch: grid (samples), block (32)
extern "C" __global__ void class_loss(float* out, const T* scores, const int* starts, int sequences, int rows,
                                      int labels, int problem, float own, float each) {
    const long long sample = blockIdx.x;
    scores += sample * labels;
    if (problem == MULTI_LABEL) {
        out += sample * (1 + labels);
        float total = 0.0f;
        for (int label = threadIdx.x; label < labels; label += WARP) {
            const float score = get(scores[label]);
            total += fmaxf(score, 0.0f) - out[1 + label] * score + log1pf(expf(-fabsf(score)));
        }
        total = warp_sum(total);
        if (threadIdx.x == 0) {
            out[0] = total / labels;
        }
        return;
    }
    out += sample_row(starts, sequences, rows) * STATISTICS;
    const float value = out[3];
    const int label = __float_as_int(value);
    float loss;
    if (problem == WEIGHED) {
        loss = get(scores[0]);
    } else if (problem == REGRESSION) {
        const float off = get(scores[0]) - value;
        loss = off * off;
    } else if (label >= 0) {
        const Softmax softmax = softmax_of(scores, labels);
        loss = softmax.most - own * get(scores[label]) + logf(softmax.sum);
        if (each != 0.0f) {
            float total = 0.0f;
            for (int other = threadIdx.x; other < labels; other += WARP) {
                total += get(scores[other]);
            }
            loss -= each * warp_sum(total);
        }
    } else {
        return;
    }
    if (threadIdx.x == 0) {
        out[0] = loss;
        out[1] = 1.0f;
    }
}

// d = scale times the loss's gradient.
// launch: grid (samples), block (32)
extern "C" __global__ void class_loss_backward(T* d, const T* scores, const float* statistics, float scale,
                                               const int* starts, int sequences, int rows, int labels,
                                               int problem, float own, float each) {
    const long long sample = blockIdx.x;
    d += sample * labels;
    scores += sample * labels;
    if (problem == MULTI_LABEL) {
        statistics += sample * (1 + labels);
        for (int label = threadIdx.x; label < labels; label += WARP) {
            const float sigmoid = 1.0f / (1.0f + expf(-get(scores[label])));
            d[label] = put(scale / labels * (sigmoid - statistics[1 + label]));
        }
        return;
    }
    const long long row = sample_row(starts, sequences, rows);
    if (problem == WEIGHED) {
        if (threadIdx.x == 0) {
            d[0] = put(scale * statistics[row * STATISTICS + 2]);
        }
        return;
    }
    const float value = statistics[row * STATISTICS + 3];
    const int own_label = __float_as_int(value);
    if (problem == REGRESSION) {
        if (threadIdx.x == 0) {
            d[0] = put(scale * 2.0f * (get(scores[0]) - value));
        }
        return;
    }
    const Softmax softmax = softmax_of(scores, labels);
    for (int label = threadIdx.x; label < labels; label += WARP) {
        const float share = expf(get(scores[label]) - softmax.most) / softmax.sum;
        d[label] = put(own_label < 0 ? 0.0f : scale * (share - (label == own_label ? own : 0.0f) - each));
    }
}
