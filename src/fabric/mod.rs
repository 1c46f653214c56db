//! The fabric: moves bytes between the processes of one run, its *ranks*, and never adds.
//!
//! A sum over ranks depends on its order, and neither MPI nor NCCL promises one. So ranks exchange
//! parts, and the rank that receives them adds them in the order of the plan.
//!
//! An [exchange](Fabric::exchange) is a list of messages to and from other ranks. Each belongs to a
//! [`Channel`] and has a number there. On every channel all ranks make their exchanges in the same
//! order; a message of another number is refused. Channels do not wait for each other, so each may
//! have a thread of its own.

mod beats;
mod clock;
pub mod conformance;
mod exchanges;
#[cfg(feature = "mpi")]
mod mpi;
#[cfg(not(feature = "mpi"))]
#[path = "no_mpi.rs"]
mod mpi;
pub mod parts;
mod threads;

use std::{env, fmt};

pub(crate) use beats::{NUMBERS, Numbers, Reports};
pub(crate) use clock::ClockOffset;
pub(crate) use exchanges::Exchanges;
pub use mpi::open as open_mpi;
pub use threads::{ThreadFabric, threads};

/// The number of a process in a run, from 0.
pub type Rank = u32;

/// A sequence of exchanges. All ranks make the exchanges of a channel in the same order.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Channel {
    /// Agreements between steps.
    Control,
    /// Parts of blocks, to all ranks.
    Blocks,
    /// Parts of gradients, each to the rank that has this part of the block.
    Gradients,
    /// Losses and sums of squares.
    Sums,
    /// The cause of a run's end.
    End,
    /// Signs of life, with reports.
    Beats,
}

impl Channel {
    /// All channels.
    pub const ALL: [Channel; 6] = [
        Channel::Control,
        Channel::Blocks,
        Channel::Gradients,
        Channel::Sums,
        Channel::End,
        Channel::Beats,
    ];
}

/// The exchange that a message belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tag {
    /// The channel.
    pub channel: Channel,
    /// The exchange's number there. All ranks must use the same number for the same exchange.
    pub number: u64,
    /// The number of the thing that is exchanged, such as a block. It must be equal on all ranks.
    pub subject: u64,
}

impl Tag {
    /// An exchange without a subject.
    pub fn new(channel: Channel, number: u64) -> Tag {
        Tag { channel, number, subject: 0 }
    }
}

impl fmt::Display for Tag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exchange {} of channel {:?}", self.number, self.channel)
    }
}

/// An exchange that did not end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Lost {
    /// These ranks have ended, or they sent or took nothing until the caller gave up.
    #[error("nothing comes from {} in {tag}", named(.ranks))]
    Ranks {
        /// The ranks.
        ranks: Vec<Rank>,
        /// The exchange.
        tag: Tag,
    },
    /// A rank sent another message than this one waits for: they do not run the same plan.
    #[error("rank {rank} sent {sent}, and {tag} waits for {expected}")]
    Disagrees {
        /// The rank.
        rank: Rank,
        /// The message that it sent.
        sent: String,
        /// The message that this rank waits for.
        expected: String,
        /// The exchange.
        tag: Tag,
    },
    /// The library under the fabric failed.
    #[error("{what}, in {tag}")]
    Failed {
        /// The library's message.
        what: String,
        /// The exchange.
        tag: Tag,
    },
}

fn named(ranks: &[Rank]) -> String {
    let all: Vec<String> = ranks.iter().map(Rank::to_string).collect();
    match &all[..] {
        [one] => format!("rank {one}"),
        all => format!("ranks {}", all.join(", ")),
    }
}

/// Moves bytes between the ranks of a run.
pub trait Fabric: Send + Sync {
    /// The rank of this process.
    fn rank(&self) -> Rank;

    /// The number of ranks.
    fn ranks(&self) -> u32;

    /// Sends messages and receives others, at most one to and one from each other rank. Returns
    /// when all of them have arrived. It calls `goes_on` many times a second, and gives up when that
    /// returns false.
    ///
    /// # Errors
    /// `goes_on` returned false before all messages had arrived; or a rank has ended, or sent
    /// another message. Then the fabric cannot be used any more, and the contents of the receiving
    /// buffers are undefined.
    fn exchange(
        &self,
        tag: Tag,
        sends: &[(Rank, &[u8])],
        receives: &mut [(Rank, &mut [u8])],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost>;
}

/// Announces a message: the numbers of its tag, and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    number: u64,
    subject: u64,
    bytes: u64,
}

impl Header {
    fn of(tag: Tag, message: &[u8]) -> Header {
        let Tag { number, subject, .. } = tag;
        Header { number, subject, bytes: message.len() as u64 }
    }

    /// The error of a rank that announced this message instead of `expected`.
    fn refused(self, rank: Rank, expected: Header, tag: Tag) -> Lost {
        let words = |Header { number, subject, bytes }| {
            format!("{bytes} bytes of exchange {number} (of {subject})")
        };
        Lost::Disagrees { rank, sent: words(self), expected: words(expected), tag }
    }
}

/// Sends the same bytes to all other ranks, and returns those of each rank, its own included.
/// Messages may have different lengths; none is longer than 4 GiB. It makes two exchanges: the
/// first, of lengths, has this tag, and the second the next number.
///
/// # Errors
/// As [`Fabric::exchange`].
pub fn gather(
    fabric: &dyn Fabric,
    tag: Tag,
    own: &[u8],
    goes_on: &dyn Fn() -> bool,
) -> Result<Vec<Vec<u8>>, Lost> {
    let others = || (0..fabric.ranks()).filter(|&rank| rank != fabric.rank());
    let everywhere = |number: u64, own: &[u8], all: &mut Vec<Vec<u8>>| {
        let sends: Vec<_> = others().map(|rank| (rank, own)).collect();
        let receives = (0..).zip(all.iter_mut()).filter(|(rank, _)| *rank != fabric.rank());
        let mut receives: Vec<_> = receives.map(|(rank, to)| (rank, &mut to[..])).collect();
        let tag = Tag { number, ..tag };
        fabric.exchange(tag, &sends, &mut receives, goes_on)
    };
    let mut lengths: Vec<Vec<u8>> = (0..fabric.ranks()).map(|_| vec![0; 4]).collect();
    everywhere(tag.number, &(own.len() as u32).to_le_bytes(), &mut lengths)?;
    let length = |bytes: &Vec<u8>| u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let mut all: Vec<Vec<u8>> =
        lengths.iter().map(|bytes| vec![0; length(bytes) as usize]).collect();
    everywhere(tag.number + 1, own, &mut all)?;
    all[fabric.rank() as usize] = own.to_vec();
    Ok(all)
}

/// The rank of this process and the number of ranks, if a launcher (`mpirun`, `srun`) started
/// several: read from its environment, without MPI.
pub fn launched() -> Option<(Rank, u32)> {
    // Open MPI; MPICH and others of PMI; steps of Slurm.
    let launchers = [
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
        ("PMI_RANK", "PMI_SIZE"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ];
    let found = launchers.iter().find_map(|(rank, ranks)| Some((number(rank)?, number(ranks)?)));
    found.filter(|(_, ranks)| *ranks > 1)
}

/// The number of this process on its host, from 0, if the launcher says so.
pub fn launched_on_host() -> Option<u32> {
    // Open MPI; MPICH and others of its family; steps of Slurm.
    let names = ["OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "SLURM_LOCALID"];
    names.into_iter().find_map(number)
}

/// A variable of the environment that is a number.
fn number(name: &str) -> Option<u32> {
    env::var(name).ok()?.parse().ok()
}
