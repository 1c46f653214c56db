//! Devices: what the ring's lanes are made of.

pub(crate) mod cpu;
