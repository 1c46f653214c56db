//! Boundaries: the tensors that a micro-batch carries from one visit to another.
//!
//! A boundary has a name (its [`Role`]) and a format in the stash (its [`Encoding`]). So a visit
//! asks for its inputs by name, and no code counts them, compares their sizes or relies on their
//! order.

use std::fmt;

/// The content of a boundary. A visit of a device reads at most one boundary of each role, and
/// writes at most one. Each layer declares the boundaries of its steps: see
/// [`RingStep`](super::RingStep).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// The residual stream: what one layer hands to the next.
    Hidden,
    /// The gradient of the residual stream, on its way down.
    HiddenGradient,
    /// Intermediates of a layer that its backward pass would otherwise recompute.
    SavedActivations,
    /// Running maximum, sum, target's logit and label of each position, which the head's tiles
    /// pass on.
    Statistics,
    /// The gradient of the head's input, which the head's tiles add up.
    HeadGradient,
    /// The sum of what some pieces of a layer computed: the next piece adds to it, the last makes a
    /// hidden state of it. See [`Cut`](super::Cut). Its gradient is that of the hidden state.
    Partial,
    /// The gradient that all pieces of a sum have for their common input, as far as it is added up.
    PartialGradient,
    /// Logits, or scores of classes, for the host.
    Logits,
    /// What a layer measures of each sequence in its forward pass, for a balance: the host takes it
    /// from all layers, and answers.
    Routing,
    /// The host's answer to a layer's [`Routing`](Role::Routing), for its backward pass.
    Balance,
    /// Keys and values of earlier positions, or the states behind them, from the KV cache.
    CachedKv,
    /// Keys and values of this step's positions, or the states behind them, for the KV cache.
    NewKv,
    /// A tensor that only some layers know: the layer that writes it and those that read it agree
    /// on a number.
    Own(u16),
    /// The gradient of the tensor [`Own`](Role::Own) of the same number.
    OwnGradient(u16),
}

impl Role {
    /// True for a gradient of activations.
    pub fn is_gradient(self) -> bool {
        use Role::{HeadGradient, HiddenGradient, OwnGradient, PartialGradient};
        matches!(self, HiddenGradient | HeadGradient | PartialGradient | OwnGradient(_))
    }

    /// True for activations that the backward pass of their writer needs the gradient of.
    pub fn has_gradient(self) -> bool {
        matches!(self, Role::Hidden | Role::Partial | Role::Own(_))
    }

    /// True for a boundary that the host brings: the gather writes it for the layer that reads it.
    pub fn comes_from_host(self) -> bool {
        self == Role::CachedKv
    }

    /// True for a boundary that no layer reads: it is there when the loss is.
    pub fn goes_to_host(self) -> bool {
        matches!(self, Role::Logits | Role::NewKv)
    }

    /// True for keys and values. Their place on the host is the KV cache, which outlives the step;
    /// every other boundary has its place in the stash.
    pub fn is_kv(self) -> bool {
        matches!(self, Role::CachedKv | Role::NewKv)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Own(number) => return write!(f, "own tensor {number}"),
            Role::OwnGradient(number) => return write!(f, "gradient of own tensor {number}"),
            Role::Hidden => "hidden state",
            Role::HiddenGradient => "hidden gradient",
            Role::SavedActivations => "saved activations",
            Role::Statistics => "statistics",
            Role::HeadGradient => "head gradient",
            Role::Partial => "partial sum",
            Role::PartialGradient => "partial gradient",
            Role::Logits => "logits",
            Role::Routing => "routing",
            Role::Balance => "balance",
            Role::CachedKv => "cached keys and values",
            Role::NewKv => "new keys and values",
        })
    }
}

/// The format of a boundary in the stash.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Encoding {
    /// As it lies in its slots on the device.
    Plain,
    /// Each number rounded to bf16: packed when it is downloaded, unpacked when it is uploaded.
    Bf16,
    /// Each number as one of 255 multiples of its block's scale. Packed and unpacked likewise.
    Int8 {
        /// Numbers of a row that share a scale.
        block: u32,
    },
}

/// The data that a micro-batch carries from one visit to another, through the stash. Its size
/// follows from the micro-batch: a number of bytes for each token and one for each sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Boundary {
    /// The role of its content.
    pub role: Role,
    /// The format in the stash.
    pub encoding: Encoding,
    /// Bytes of one of its numbers, in its slots.
    pub element_bytes: u8,
    /// Bytes for each token, in a slot.
    pub token_bytes: u64,
    /// Bytes for each sequence beside those of its tokens, in a slot and in the stash.
    pub sequence_bytes: u64,
    /// Bytes for each token in the stash, and on the way there.
    pub stashed_token_bytes: u64,
}

impl Boundary {
    /// A boundary with `width` numbers of `element_bytes` for each token, which the stash holds as
    /// the device does.
    pub fn of_tokens(role: Role, width: usize, element_bytes: usize) -> Boundary {
        let token_bytes = (width * element_bytes) as u64;
        Boundary {
            role,
            encoding: Encoding::Plain,
            element_bytes: element_bytes as u8,
            token_bytes,
            sequence_bytes: 0,
            stashed_token_bytes: token_bytes,
        }
    }

    /// A boundary with `width` numbers of `element_bytes` for each sequence, however long.
    pub fn of_sequences(role: Role, width: usize, element_bytes: usize) -> Boundary {
        let sequence_bytes = (width * element_bytes) as u64;
        Boundary { sequence_bytes, ..Boundary::of_tokens(role, 0, element_bytes) }
    }

    /// Numbers for each token.
    pub fn width(&self) -> usize {
        self.token_bytes as usize / usize::from(self.element_bytes)
    }

    /// Bytes in a slot of sequences that have `tokens` in all: whole floats.
    pub fn bytes(&self, sequences: u64, tokens: u64) -> u64 {
        self.sized(self.token_bytes, sequences, tokens)
    }

    /// Bytes in the stash of sequences that have `tokens` in all: whole floats.
    pub fn stashed_bytes(&self, sequences: u64, tokens: u64) -> u64 {
        self.sized(self.stashed_token_bytes, sequences, tokens)
    }

    fn sized(&self, token_bytes: u64, sequences: u64, tokens: u64) -> u64 {
        let of_tokens = token_bytes.saturating_mul(tokens);
        let bytes = of_tokens.saturating_add(self.sequence_bytes.saturating_mul(sequences));
        bytes.checked_next_multiple_of(4).unwrap_or(u64::MAX)
    }
}

impl fmt::Display for Boundary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Boundary { token_bytes, sequence_bytes, element_bytes, .. } = self;
        write!(f, "{token_bytes} bytes a token")?;
        if *sequence_bytes > 0 {
            write!(f, " and {sequence_bytes} a sequence")?;
        }
        write!(f, " in numbers of {element_bytes} bytes")
    }
}
