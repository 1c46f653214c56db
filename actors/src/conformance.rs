//! Any implementation of the ports can be run through this suite.
