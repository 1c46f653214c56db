//! The fabric of MPI: one thread makes all calls, for MPI moves bytes only while it is called.
//!
//! A message is cut into pieces, each of which is copied from or to memory of the fabric. So MPI
//! never touches memory of a caller, and a caller may give up at any time. The first piece begins
//! with the message's header. On a channel, at most [`WINDOW`] pieces are on their way from one
//! rank to another.
//!
//! After a failure MPI is neither called nor finalized: the process ends with another status than
//! 0, and the launcher ends the others.

mod world;

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard};
use std::thread;
use std::time::Duration;

use flume::{Receiver, RecvTimeoutError, Sender};

use self::world::{Ask, PIECE, Piece, Place, Post, Reply, World};
use super::exchanges::UNEQUAL;
use super::{Channel, Fabric, Header, Lost, Rank, Tag};
use crate::error::Error;

/// Bytes of a header: number, subject and length.
const HEADER: usize = 24;

/// The most pieces of a message that are on their way: one moves while the next one is copied.
const WINDOW: usize = 2;

/// How long a caller waits before it asks again whether to go on.
const PATIENCE: Duration = Duration::from_millis(10);

/// This rank's side of the fabric. Its thread makes the calls.
struct Mpi {
    rank: Rank,
    ranks: u32,
    asks: Sender<Ask>,
    /// The thread of MPI drops its side when it ends.
    ended: Receiver<()>,
    /// How long this rank waits for others to finalize MPI.
    patience: Duration,
    /// One exchange at a time on each channel.
    channels: [Mutex<()>; Channel::ALL.len()],
    /// Pieces that are not in use.
    free: Mutex<Vec<Piece>>,
    has_failed: AtomicBool,
}

/// The fabric of MPI, for all ranks that a launcher started. It can be opened once in a process.
/// MPI starts, and is finalized, by all ranks together. A rank waits for the others ten times as
/// long as `patience`: they need not start at the same time.
///
/// # Errors
/// MPI refuses, or was opened before; or another rank does not start.
pub fn open(patience: Duration) -> Result<Box<dyn Fabric>, Error> {
    static OPENED: AtomicBool = AtomicBool::new(false);
    if OPENED.swap(true, Relaxed) {
        return Err(Error::argument("MPI was opened in this process before"));
    }
    let (asks, asked) = flume::unbounded();
    let (begun, begins) = flume::bounded(1);
    let (ends, ended) = flume::bounded(0);
    let patience = UNEQUAL * patience;
    let spawned = thread::Builder::new().name("l2l-mpi".into()).spawn(move || {
        let _ends: Sender<()> = ends;
        let world = World::initialise();
        let is_there = world.is_ok();
        let size = world.as_ref().map(|world| (world.rank, world.ranks)).map_err(Clone::clone);
        if begun.send(size).is_ok() && is_there {
            world.into_iter().for_each(|mut world| world.serve(&asked));
        }
    });
    spawned.map_err(Error::no_thread)?;
    let refused = |what: String| Error::System(format!("MPI: {what}"));
    let (rank, ranks) = match begins.recv_timeout(patience) {
        Ok(size) => size.map_err(refused)?,
        Err(RecvTimeoutError::Disconnected) => return Err(refused("its thread ended".into())),
        Err(RecvTimeoutError::Timeout) => {
            let seconds = patience.as_secs_f64();
            return Err(refused(format!(
                "not all ranks started within {seconds} s: one failed, or cannot be reached"
            )));
        }
    };
    Ok(Box::new(Mpi {
        rank,
        ranks,
        asks,
        ended,
        patience,
        channels: Default::default(),
        free: Mutex::default(),
        has_failed: AtomicBool::new(false),
    }))
}

/// One message of an exchange, on its way.
struct Sending<'m> {
    rank: Rank,
    /// The header, until it is posted.
    header: Option<[u8; HEADER]>,
    left: &'m [u8],
    posted: usize,
}

/// One message of an exchange, as it comes.
struct Receiving<'m, 'b> {
    rank: Rank,
    to: &'m mut &'b mut [u8],
    /// Bytes that have come; `None` until the header has come.
    came: Option<usize>,
    /// Pieces that were posted and have not come.
    posted: usize,
    /// Bytes that posted pieces will bring.
    coming: usize,
}

impl Fabric for Mpi {
    fn rank(&self) -> Rank {
        self.rank
    }

    fn ranks(&self) -> u32 {
        self.ranks
    }

    fn exchange(
        &self,
        tag: Tag,
        sends: &[(Rank, &[u8])],
        receives: &mut [(Rank, &mut [u8])],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        let sending = |&(rank, message)| {
            let header = Some(Header::of(tag, message).to_bytes());
            Sending { rank, header, left: message, posted: 0 }
        };
        let receiving = |(rank, to)| Receiving { rank, to, came: None, posted: 0, coming: 0 };
        let mut sending: Vec<_> = sends.iter().map(sending).collect();
        let receives = receives.iter_mut().map(|(rank, to)| (*rank, to));
        let mut receiving: Vec<_> = receives.map(receiving).collect();
        let _alone = self.channels[tag.channel as usize].lock();
        let ended = self.move_all(tag, &mut sending, &mut receiving, goes_on);
        ended.inspect_err(|_| self.has_failed.store(true, Relaxed))
    }
}

impl Mpi {
    /// Posts pieces and takes replies, until all messages have been sent and received.
    fn move_all(
        &self,
        tag: Tag,
        sending: &mut [Sending<'_>],
        receiving: &mut [Receiving<'_, '_>],
        goes_on: &dyn Fn() -> bool,
    ) -> Result<(), Lost> {
        let (reply, replies) = flume::unbounded();
        loop {
            for (nth, message) in sending.iter_mut().enumerate() {
                while message.posted < WINDOW
                    && let Some(piece) = message.next(|| self.piece())
                {
                    let place = Place { message: nth, at: 0 };
                    self.post(tag, true, message.rank, piece, place, &reply)?;
                }
            }
            for (nth, message) in receiving.iter_mut().enumerate() {
                while message.posted < WINDOW
                    && let Some(at) = message.expects_more()
                {
                    let place = Place { message: nth, at };
                    self.post(tag, false, message.rank, self.piece(), place, &reply)?;
                }
            }
            if sending.iter().all(Sending::is_done) && receiving.iter().all(Receiving::is_done) {
                return Ok(());
            }
            let Reply { sends, place: Place { message, at }, done } =
                match replies.recv_timeout(PATIENCE) {
                    Ok(reply) => reply,
                    Err(RecvTimeoutError::Timeout) if goes_on() => continue,
                    Err(_) => return Err(lost(tag, sending, receiving)),
                };
            let piece = done.map_err(|what| Lost::Failed { what, tag })?;
            if sends {
                sending[message].posted -= 1;
            } else {
                receiving[message].take(piece.bytes(), at, tag)?;
            }
            self.lock_free().push(piece);
        }
    }

    fn post(
        &self,
        tag: Tag,
        sends: bool,
        rank: Rank,
        piece: Piece,
        place: Place,
        reply: &Sender<Reply>,
    ) -> Result<(), Lost> {
        let reply = reply.clone();
        let post = Post { sends, rank, channel: tag.channel, piece, place, reply };
        let ended = |_| Lost::Failed { what: "the thread of MPI has ended".into(), tag };
        self.asks.send(Ask::Post(post)).map_err(ended)
    }

    /// Room for a piece; it may hold an old one.
    fn piece(&self) -> Piece {
        let new = || Piece { memory: vec![0; PIECE].into(), filled: 0 };
        self.lock_free().pop().unwrap_or_else(new)
    }

    fn lock_free(&self) -> MutexGuard<'_, Vec<Piece>> {
        self.free.lock().expect("nothing panics inside")
    }
}

/// The ranks that an exchange still waits for.
fn lost(tag: Tag, sending: &[Sending<'_>], receiving: &[Receiving<'_, '_>]) -> Lost {
    let silent = receiving.iter().filter(|message| !message.is_done());
    let mut ranks: Vec<Rank> = silent.map(|message| message.rank).collect();
    if ranks.is_empty() {
        let full = sending.iter().filter(|message| !message.is_done());
        ranks = full.map(|message| message.rank).collect();
    }
    Lost::Ranks { ranks, tag }
}

impl Sending<'_> {
    fn is_done(&self) -> bool {
        self.header.is_none() && self.left.is_empty() && self.posted == 0
    }

    fn next(&mut self, room: impl FnOnce() -> Piece) -> Option<Piece> {
        if self.header.is_none() && self.left.is_empty() {
            return None;
        }
        let mut piece = room();
        let header = self.header.take();
        let header = header.as_ref().map_or(&[][..], |header| header);
        let (now, later) = self.left.split_at(self.left.len().min(PIECE - header.len()));
        piece.filled = header.len() + now.len();
        piece.memory[..header.len()].copy_from_slice(header);
        piece.memory[header.len()..piece.filled].copy_from_slice(now);
        self.left = later;
        self.posted += 1;
        Some(piece)
    }
}

impl Receiving<'_, '_> {
    fn is_done(&self) -> bool {
        self.came == Some(self.to.len())
    }

    /// Where the next piece goes, if one is expected: the first, and others once the header has
    /// come.
    fn expects_more(&mut self) -> Option<usize> {
        let expects = match self.came {
            None => self.posted == 0,
            Some(_) => self.coming < self.to.len(),
        };
        let at = self.coming;
        if expects {
            let room = if self.came.is_none() { PIECE - HEADER } else { PIECE };
            self.coming = (at + room).min(self.to.len());
            self.posted += 1;
        }
        expects.then_some(at)
    }

    /// Takes a piece that came. Large pieces may arrive in another order than they were sent.
    fn take(&mut self, piece: &[u8], at: usize, tag: Tag) -> Result<(), Lost> {
        self.posted -= 1;
        let expected = Header::of(tag, self.to);
        let mut bytes = piece;
        if self.came.is_none() {
            let header = piece.first_chunk().map(Header::from_bytes);
            match header {
                Some(header) if header == expected => bytes = &piece[HEADER..],
                Some(header) => return Err(header.refused(self.rank, expected, tag)),
                None => return Err(self.cut_off(piece.len(), tag)),
            }
        }
        let Some(to) = self.to.get_mut(at..at + bytes.len()) else {
            return Err(self.cut_off(at + bytes.len(), tag));
        };
        to.copy_from_slice(bytes);
        self.came = Some(self.came.unwrap_or(0) + bytes.len());
        Ok(())
    }

    fn cut_off(&self, bytes: usize, tag: Tag) -> Lost {
        let sent = format!("{bytes} bytes");
        let expected = format!("{} bytes", self.to.len());
        Lost::Disagrees { rank: self.rank, sent, expected, tag }
    }
}

impl Header {
    fn to_bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        let words = [self.number, self.subject, self.bytes];
        for (to, word) in bytes.chunks_exact_mut(8).zip(words) {
            to.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn from_bytes(bytes: &[u8; HEADER]) -> Header {
        let word = |at: usize| {
            let word = bytes[at..at + 8].try_into().expect("eight bytes");
            u64::from_le_bytes(word)
        };
        Header { number: word(0), subject: word(8), bytes: word(16) }
    }
}

impl Drop for Mpi {
    fn drop(&mut self) {
        let fails = self.has_failed.load(Relaxed) || thread::panicking();
        if fails || self.asks.send(Ask::End).is_err() {
            return;
        }
        // All exchanges are made, so the wait for a rank that is lost now has a limit.
        _ = self.ended.recv_timeout(self.patience);
    }
}
