//! The relay of `l2l`.

pub use l2l_actors as actors;
