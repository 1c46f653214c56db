// Makes cute.json: which lane holds which element of matrices that quad pairs multiply, by CUTLASS's CuTe.
// check.py compares the emulated product of sm_70 with it.
//
//     c++ -std=c++17 -I cutlass/include -I cuda/include cute.cpp -o cute
//     ./cute > cute.json
//
// The file was made with CUTLASS of commit 7107b05 and the headers of the Python packages nvidia-cuda-runtime-cu12,
// nvidia-cuda-nvcc-cu12 and nvidia-cuda-cccl-cu12. No GPU is needed.

#include <cstdio>

#include <cute/atom/mma_traits_sm70.hpp>

using namespace cute;

// A list of numbers.
template <class Number>
void list(const char* name, int count, Number number) {
    std::printf("\"%s\": [", name);
    for (int i = 0; i < count; ++i) {
        std::printf("%s%d", i == 0 ? "" : ", ", static_cast<int>(number(i)));
    }
    std::printf("]");
}

// Row + 8 column, in matrices of 8 × 4, 4 × 8 (its transpose) and 8 × 8, of each element of each lane of a quad pair.
template <class Traits>
void quad_pair(const char* name) {
    std::printf("\"%s\": {\"lanes\": [", name);
    for (int i = 0; i < 8; ++i) {
        std::printf("%s%d", i == 0 ? "" : ", ", int(typename Traits::ThrID{}(i)));
    }
    std::printf("],\n");
    list("left", 8 * 4, [&](int i) { return typename Traits::ALayout{}(i / 4, i % 4); });
    std::printf(",\n");
    list("right", 8 * 4, [&](int i) { return typename Traits::BLayout{}(i / 4, i % 4); });
    std::printf(",\n");
    list("sums", 8 * 8, [&](int i) { return typename Traits::CLayout{}(i / 8, i % 8); });
    std::printf("}");
}

int main() {
    std::printf("{");
    quad_pair<MMA_Traits<SM70_8x8x4_F32F16F16F32_TN>>("quad_pair");
    std::printf(",\n");
    quad_pair<MMA_Traits<SM70_8x8x4_F32F16F16F32_TT>>("quad_pair_turned");
    std::printf("}\n");
}
