//! The signed 8-bit dynamic map of bitsandbytes (Dettmers et al. 2022, "8-bit Optimizers via
//! Block-wise Quantization"): the values of the 256 codes, from −0.993 to 1.
//!
//! This is a table and not the formula, because the last bits come from PyTorch's `linspace`.

/// The positive values but 1. Each is a value with the other sign, too.
#[rustfmt::skip]
const POSITIVE: [f32; 127] = [
    5.5000004e-7, 3.2500002e-6, 7.75e-6, 2.1249998e-5, 4.375e-5, 6.625e-5, 8.875e-5, 0.00015625001,
    0.00026875004, 0.00038125002, 0.00049375003, 0.0006062501, 0.00071875006, 0.00083125,
    0.0009437501, 0.0012812499, 0.00184375, 0.00240625, 0.00296875, 0.0035312497, 0.00409375,
    0.0046562497, 0.0052187503, 0.00578125, 0.00634375, 0.00690625, 0.00746875, 0.00803125,
    0.00859375, 0.009156249, 0.00971875, 0.01140625, 0.01421875, 0.01703125, 0.019843752,
    0.02265625, 0.02546875, 0.028281251, 0.03109375, 0.03390625, 0.036718752, 0.03953125,
    0.042343747, 0.04515625, 0.04796875, 0.05078125, 0.05359375, 0.05640625, 0.059218753,
    0.06203125, 0.06484375, 0.067656256, 0.070468746, 0.07328125, 0.07609375, 0.07890625,
    0.08171876, 0.08453125, 0.08734375, 0.09015625, 0.092968754, 0.09578126, 0.09859375,
    0.107031256, 0.12109375, 0.13515624, 0.14921875, 0.16328125, 0.17734376, 0.19140625,
    0.20546874, 0.21953125, 0.23359375, 0.24765624, 0.26171875, 0.27578127, 0.28984374, 0.30390626,
    0.31796873, 0.33203125, 0.34609374, 0.36015624, 0.37421876, 0.38828123, 0.40234375, 0.41640624,
    0.43046874, 0.44453126, 0.45859373, 0.47265625, 0.4867187, 0.50078124, 0.5148437, 0.5289062,
    0.54296875, 0.5570313, 0.5710938, 0.58515626, 0.5992187, 0.61328125, 0.6273438, 0.6414063,
    0.65546876, 0.6695312, 0.68359375, 0.6976563, 0.7117188, 0.72578126, 0.7398437, 0.75390625,
    0.7679688, 0.78203124, 0.79609376, 0.8101562, 0.82421875, 0.8382813, 0.85234374, 0.86640626,
    0.8804687, 0.89453125, 0.9085938, 0.92265624, 0.93671876, 0.9507812, 0.96484375, 0.9789063,
    0.99296874,
];

/// The values of the codes, in ascending order: the negative ones, 0, the positive ones, 1.
pub(super) const VALUES: [f32; 256] = {
    let mut values = [0.0; 256];
    let mut index = 0;
    while index < POSITIVE.len() {
        values[126 - index] = -POSITIVE[index];
        values[128 + index] = POSITIVE[index];
        index += 1;
    }
    values[255] = 1.0;
    values
};

/// Midpoints between neighbours. The code of a number is the count of midpoints below it.
const MIDPOINTS: [f32; 255] = {
    let mut midpoints = [0.0; 255];
    let mut index = 0;
    while index < midpoints.len() {
        midpoints[index] = (VALUES[index] + VALUES[index + 1]) / 2.0;
        index += 1;
    }
    midpoints
};

/// The code of the nearest value; the lower one if two are equally near.
pub(super) fn nearest(number: f32) -> u8 {
    MIDPOINTS.partition_point(|midpoint| *midpoint < number) as u8
}
