//! The tests of the ring in one program, because each test program is linked anew.
//!
//! One file: `cargo test -p l2l-actors --test integration makespan::`. `tests/failure.rs` is a
//! program of its own: it counts the threads of its process and replaces the panic hook.

mod bounds;
mod choice;
mod closed_forms;
#[path = "../common/mod.rs"]
mod common;
mod conformance;
mod deadlock;
mod declared;
mod delayed;
mod hand_over;
mod hangs;
mod interleavings;
mod joined;
mod makespan;
mod misuse;
mod objective;
mod piece_times;
mod pieces;
mod pipedream;
mod pipedream_2bw;
mod pipelines;
mod references;
mod reports;
mod rules;
mod runs;
mod serial;
mod windows;
