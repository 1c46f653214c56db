//! The bytes equal bitsandbytes' (`tests/goldens/quantised.py`) on any number of threads.

use std::path::Path;

use half::bf16;
use serde_json::Value;
use sha2::{Digest, Sha256};

use super::*;

const BOTH: [Quantisation; 2] = [Quantisation::Nf4, Quantisation::Int8];

/// Uniform noise, of another size in each block, as the script makes it.
fn noise(elements: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x1234_5678;
    let next = |at: usize| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let value = (state >> 40) as f32 / (1_u64 << 23) as f32 - 1.0;
        value * ((1 + at / BLOCK * 37 % 101) as f32 / 128.0)
    };
    (0..elements).map(next).collect()
}

fn number(case: &Value, key: &str) -> usize {
    case[key].as_u64().expect("the golden has it") as usize
}

/// The input of a golden case.
fn input(case: &Value) -> Vec<f32> {
    let mut values = noise(
        number(case, "rows") * number(case, "columns"),
        case["seed"].as_u64().expect("a seed"),
    );
    if case["bf16"] == true {
        values.iter_mut().for_each(|value| *value = bf16::from_f32(*value).to_f32());
    }
    let list = |key: &str| case[key].as_array().cloned().unwrap_or_default();
    for block in list("zeros") {
        let from = block.as_u64().expect("a block") as usize * BLOCK;
        let end = values.len().min(from + BLOCK);
        values[from..end].fill(0.0);
    }
    for place in list("put") {
        let [at, bits] = [0, 1].map(|index| place[index].as_u64().expect("a place and bits"));
        values[at as usize] = f32::from_bits(bits as u32);
    }
    values
}

/// Panics unless bytes equal a golden's: in hexadecimal, or as their SHA-256 behind a #.
#[track_caller]
fn same(case: &Value, key: &str, bytes: &[u8]) {
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let expected = case[key].as_str().expect("a text");
    let found = match expected.strip_prefix('#') {
        Some(_) => format!("#{}", hex(&Sha256::digest(bytes))),
        None => hex(bytes),
    };
    let [rows, columns] = ["rows", "columns"].map(|key| &case[key]);
    assert_eq!(found, expected, "{key} of {rows} by {columns}");
}

fn golden() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/quantised/golden.json");
    let text = std::fs::read_to_string(path).expect("it is committed");
    serde_json::from_str(&text).expect("it is JSON")
}

/// The storage of a matrix, encoded with a level's instructions.
fn encoded(how: Quantisation, level: Level, from: &[f32], shape: [usize; 2]) -> Vec<f32> {
    let mut storage = vec![f32::NAN; how.floats(shape[0], shape[1])];
    how.encode_at(level, from, shape, &mut storage).expect("all are finite");
    storage
}

#[test]
#[cfg_attr(miri, ignore = "its matrices take Miri minutes")]
fn bytes_and_values_are_those_of_bitsandbytes() {
    let golden = golden();
    same(&golden, "nf4_map", bytemuck::cast_slice(&NF4));
    same(&golden, "dynamic_map", bytemuck::cast_slice(&dynamic_map::VALUES));
    for (how, key) in BOTH.into_iter().zip(["nf4", "int8"]) {
        let cases = golden[key].as_array().expect("cases");
        assert!(cases.len() > 3);
        for case in cases {
            let from = input(case);
            let shape = ["rows", "columns"].map(|key| number(case, key));
            let parts = how.parts_of(shape, None);
            for level in Level::all() {
                let storage = encoded(how, level, &from, shape);
                let bytes: &[u8] = bytemuck::cast_slice(&storage);
                let part = |index: usize, bytes_of: usize| {
                    let from = 4 * parts[index];
                    let end = 4 * parts[index + 1];
                    let is_zero = |bytes: &[u8]| bytes.iter().all(|byte| *byte == 0);
                    assert!(is_zero(&bytes[from + bytes_of..end]), "what lies between is zero");
                    &bytes[from..from + bytes_of]
                };
                let n = from.len();
                match how {
                    Quantisation::Nf4 => {
                        same(case, "codes", part(0, n.div_ceil(2)));
                        same(case, "absmax_codes", part(1, n.div_ceil(64)));
                        same(case, "groups", part(2, 4 * n.div_ceil(64 * 256)));
                        same(case, "offset", part(3, 4));
                    }
                    Quantisation::Int8 => {
                        same(case, "codes", part(0, n));
                        same(case, "scales", part(1, 4 * shape[0]));
                    }
                    Quantisation::Bf16 => unreachable!("it has no golden"),
                }
                let mut decoded = vec![f32::NAN; n];
                how.decode_at(level, &storage, shape, None, &mut decoded);
                same(case, "decoded", bytemuck::cast_slice(&decoded));
            }
        }
    }
}

#[test]
fn threads_change_no_bits() {
    let shape = if cfg!(miri) { [3, 70] } else { [150, 333] };
    let from = noise(shape[0] * shape[1], 9);
    let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    for how in BOTH {
        let on = |threads: usize| {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads);
            pool.build().expect("a pool").install(|| {
                let storage = encoded(how, Level::best(), &from, shape);
                let mut decoded = vec![f32::NAN; from.len()];
                how.decode(&storage, shape[0], shape[1], &mut decoded);
                (bits(&storage), bits(&decoded))
            })
        };
        assert_eq!(on(1), on(5), "{how:?}");
    }
}

#[test]
fn every_element_has_the_nearest_code() {
    let shape = if cfg!(miri) { [3, 70] } else { [70, 101] };
    let from = noise(shape[0] * shape[1], 3);
    for how in BOTH {
        let storage = encoded(how, Level::best(), &from, shape);
        let codes: &[u8] = bytemuck::cast_slice(&storage);
        for (at, value) in from.iter().enumerate() {
            let (all, step, code): (&[f32], _, _) = match how {
                Quantisation::Nf4 => {
                    let block = at / BLOCK * BLOCK;
                    let end = from.len().min(block + BLOCK);
                    let code = codes[at / 2] >> (4 * (1 - at % 2)) & 15;
                    (&from[block..end], None, f64::from(NF4[usize::from(code)]))
                }
                Quantisation::Int8 => {
                    let row = at / shape[1] * shape[1];
                    let step = 1.0 / 127.0;
                    (&from[row..row + shape[1]], Some(step), f64::from(codes[at] as i8) * step)
                }
                Quantisation::Bf16 => unreachable!("it has no codes"),
            };
            let most = all.iter().fold(0.0, |most: f64, value| most.max(f64::from(value.abs())));
            let scaled = f64::from(*value) / most;
            let nearest = match step {
                Some(step) => step / 2.0,
                None => {
                    NF4.iter().fold(2.0_f64, |near, of| near.min((scaled - f64::from(*of)).abs()))
                }
            };
            assert!((scaled - code).abs() < nearest + 1e-6, "{how:?}: {value} at {at} is {code}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "its matrices take Miri minutes")]
fn zeros_stay_zeros_and_tiny_numbers_become_zeros() {
    for (how, [rows, columns]) in
        BOTH.into_iter().zip([[1, 1], [3, 64], [2, 65], [129, 129]].repeat(2))
    {
        for value in [0.0, 1e-40, -1e-42] {
            let from = vec![value; rows * columns];
            let storage = encoded(how, Level::best(), &from, [rows, columns]);
            let mut decoded = vec![f32::NAN; from.len()];
            how.decode(&storage, rows, columns, &mut decoded);
            assert!(decoded.iter().all(|value| *value == 0.0), "{how:?} of {value}");
        }
    }
}

#[test]
#[cfg_attr(miri, ignore = "its matrices take Miri minutes")]
fn what_is_not_finite_is_named() {
    let rows = 40;
    let columns = 1000;
    for (how, value) in BOTH.into_iter().zip([f32::NAN, f32::NEG_INFINITY]) {
        let mut from = noise(rows * columns, 1);
        for at in [39_999, 17_003, 30_000] {
            from[at] = value;
        }
        let mut storage = vec![7.0; how.floats(rows, columns)];
        let error = how.encode(&from, rows, columns, &mut storage).expect_err("one is not finite");
        assert_eq!((error.row, error.column), (17, 3));
        assert_eq!(error.value.to_bits(), value.to_bits());
        assert!(error.to_string().starts_with("row 17, column 3 (from 0) is "), "{error}");
        assert!(storage.iter().all(|value| *value == 7.0), "nothing was written");
    }
}

#[test]
#[cfg_attr(miri, ignore = "its matrices take Miri minutes")]
fn parts_are_aligned_and_have_room() {
    for how in BOTH {
        for [rows, columns] in [[0, 0], [0, 5], [4, 0], [1, 1], [3, 33], [128, 129], [5000, 4096]] {
            let parts = how.parts_of([rows, columns], None);
            assert!(parts.iter().all(|part| part.is_multiple_of(4)), "16 bytes");
            assert!(parts.is_sorted() && parts[0] == 0);
            let floats = how.floats(rows, columns);
            assert!(floats.is_multiple_of(16) && floats == parts[PARTS]);
            if rows * columns < 1 << 20 {
                let from = noise(rows * columns, 1);
                let storage = encoded(how, Level::Portable, &from, [rows, columns]);
                how.decode(&storage, rows, columns, &mut vec![f32::NAN; from.len()]);
            }
        }
        let bits = 32.0 * how.floats(5000, 4096) as f64 / (5000.0 * 4096.0);
        let expected = if how == Quantisation::Nf4 { 4.127 } else { 8.008 };
        assert!((bits - expected).abs() < 1e-3, "{how:?}: {bits} bits an element");
    }
}

#[test]
fn brain_floats_are_rounded_once() {
    let shape = if cfg!(miri) { [3, 71] } else { [33, 701] };
    let mut from = noise(shape[0] * shape[1], 5);
    (from[3], from[4]) = (f32::INFINITY, -0.0);
    for level in Level::all() {
        let storage = encoded(Quantisation::Bf16, level, &from, shape);
        let mut decoded = vec![f32::NAN; from.len()];
        Quantisation::Bf16.decode_at(level, &storage, shape, None, &mut decoded);
        for (found, value) in decoded.iter().zip(&from) {
            assert_eq!(found.to_bits(), bf16::from_f32(*value).to_f32().to_bits());
        }
    }
}
