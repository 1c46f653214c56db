//! Cost of the ring.

fn main() {}
