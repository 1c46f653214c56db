// Makes kernels_cute.json: what CUTLASS's CuTe says of matrices that wgmma multiplies, and quad pairs. kernels.py
// compares the emulated products, and the tiles and descriptors of kernels/attention, with it.
//
//     c++ -std=c++17 -I cutlass/include -I cuda/include kernels_cute.cpp -o cute
//     ./cute | grep -v cast_smem_ptr > kernels_cute.json
//
// The file was made with CUTLASS of commit 7107b05 and the headers of the Python packages nvidia-cuda-runtime-cu12,
// nvidia-cuda-nvcc-cu12 and nvidia-cuda-cccl-cu12. No GPU is needed: CuTe says that it does not know an address, and
// takes it as 0.

#include <cstdint>
#include <cstdio>
#include <cstdlib>

#include <cute/atom/mma_traits_sm70.hpp>
#include <cute/atom/mma_traits_sm90_gmma.hpp>
#include <cute/tensor.hpp>

using namespace cute;
using T = bfloat16_t;
using SM90::GMMA::Major;

void need(bool is) {
    if (!is) {
        std::abort();
    }
}

// A list of numbers.
template <class Number>
void list(const char* name, int count, Number number) {
    std::printf("\"%s\": [", name);
    for (int i = 0; i < count; ++i) {
        std::printf("%s%llu", i == 0 ? "" : ", ", static_cast<unsigned long long>(number(i)));
    }
    std::printf("]");
}

// Rows of channels, which lie side by side: where each piece of eight channels is, and the descriptors, without the
// address of the tile, of 64 rows and 16 channels, for a product over channels, and of 16 rows and 64 channels, for
// one over rows.
template <int ROWS, int HEAD>
void tile() {
    alignas(1024) static T memory[ROWS * HEAD];
    auto for_channels = make_tensor(make_smem_ptr(memory), tile_to_shape(SM90::GMMA::Layout_K_SW128_Atom<T>{},
                                                                         Shape<Int<ROWS>, Int<HEAD>>{}));
    auto for_rows = make_tensor(make_smem_ptr(memory), tile_to_shape(SM90::GMMA::Layout_MN_SW128_Atom<T>{},
                                                                     Shape<Int<HEAD>, Int<ROWS>>{}, Step<_2, _1>{}));
    for (int row = 0; row < ROWS; ++row) {
        for (int channel = 0; channel < HEAD; ++channel) {
            need(&for_channels(row, channel) == &for_rows(channel, row));
            need(&for_channels(row, channel) == &for_channels(row, channel / 8 * 8) + channel % 8);
        }
    }
    auto rows = make_tensor<SM90::GMMA::smem_desc<Major::K>>(
        group_modes<0, 2>(local_tile(for_channels, Shape<Int<64>, Int<16>>{}, make_coord(_, _))));
    auto channels = make_tensor<SM90::GMMA::smem_desc<Major::MN>>(
        group_modes<0, 2>(local_tile(for_rows, Shape<Int<64>, Int<16>>{}, make_coord(_, _))));
    std::printf("{\"rows\": %d, \"head\": %d,\n", ROWS, HEAD);
    list("places", ROWS * HEAD / 8, [&](int i) { return &for_channels(i / (HEAD / 8), i % (HEAD / 8) * 8) - memory; });
    std::printf(",\n");
    list("over_channels", ROWS / 64 * HEAD / 16,
         [&](int i) { return uint64_t(rows(0, i / (HEAD / 16), i % (HEAD / 16))); });
    std::printf(",\n");
    list("over_rows", ROWS / 16 * HEAD / 64,
         [&](int i) { return uint64_t(channels(0, i % (HEAD / 64), i / (HEAD / 64))); });
    std::printf("}");
}

// Row + 64 column of each element of each lane of the first warp. The next warps have the next 16 rows each.
template <class Layout>
void fragment(const char* name, Layout layout) {
    const int values = size<1>(layout);
    for (int thread = 0; thread < 128; ++thread) {
        for (int value = 0; value < values; ++value) {
            need(layout(thread, value) == layout(thread % 32, value) + thread / 32 * 16);
        }
    }
    list(name, 32 * values, [&](int i) { return layout(i / values, i % values); });
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
    std::printf("{\"tiles\": [\n");
    tile<64, 128>();
    std::printf(",\n");
    tile<128, 64>();
    std::printf("],\n");
    fragment("left", SM90::GMMA::ALayout_64x16{});
    std::printf(",\n");
    fragment("sums", SM90::GMMA::CLayout_64x64{});
    std::printf(",\n");
    quad_pair<MMA_Traits<SM70_8x8x4_F32F16F16F32_TN>>("quad_pair");
    std::printf(",\n");
    quad_pair<MMA_Traits<SM70_8x8x4_F32F16F16F32_TT>>("quad_pair_turned");
    std::printf("}\n");
}
