//! The calls of MPI: pieces of messages, sent and received by the one thread that calls it.

use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::thread;
use std::time::Duration;

use flume::{Receiver, Sender, TryRecvError};
use mpi::ffi;

use crate::fabric::{Channel, Rank};

/// Bytes of a piece: MPI counts in 32 bits, and large messages hang in some of its libraries.
pub(super) const PIECE: usize = 4 << 20;

/// A request to the thread of MPI.
pub(super) enum Ask {
    Post(Post),
    /// Finalize MPI.
    End,
}

/// Memory for a piece. It is allocated once and used again.
pub(super) struct Piece {
    pub(super) memory: Box<[u8]>,
    /// Bytes of the memory that are sent, or that have come.
    pub(super) filled: usize,
}

impl Piece {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.memory[..self.filled]
    }
}

/// Where a piece belongs.
#[derive(Clone, Copy)]
pub(super) struct Place {
    /// The message, by its index in the exchange.
    pub(super) message: usize,
    /// The piece's first byte in a message that is received.
    pub(super) at: usize,
}

/// A piece to send or to receive.
pub(super) struct Post {
    pub(super) sends: bool,
    pub(super) rank: Rank,
    pub(super) channel: Channel,
    pub(super) piece: Piece,
    pub(super) place: Place,
    pub(super) reply: Sender<Reply>,
}

/// The answer to a post: the piece, or MPI's error.
pub(super) struct Reply {
    pub(super) sends: bool,
    pub(super) place: Place,
    pub(super) done: Result<Piece, String>,
}

/// A piece that MPI has.
struct OnItsWay {
    request: ffi::MPI_Request,
    post: Post,
}

/// MPI, on the one thread that calls it.
pub(super) struct World {
    pub(super) rank: Rank,
    pub(super) ranks: u32,
    on_their_way: Vec<OnItsWay>,
}

/// MPI's code of success.
const SUCCESS: c_int = 0;

fn checked(code: c_int) -> Result<(), String> {
    if code == SUCCESS {
        return Ok(());
    }
    let mut text = [0 as c_char; 1024];
    let mut length = 0;
    // SAFETY: MPI writes at most 256 bytes (512 in some libraries), with a zero behind them.
    let words = unsafe {
        ffi::MPI_Error_string(code, text.as_mut_ptr(), &mut length);
        CStr::from_ptr(text.as_ptr())
    };
    Err(words.to_string_lossy().into_owned())
}

// SAFETY of all calls: this thread alone calls MPI, between `initialise` and the end; pieces have
// room for [`PIECE`] bytes, live in `on_their_way` until MPI has done with them, and do not move.
impl World {
    pub(super) fn initialise() -> Result<World, String> {
        let mut provided = 0;
        let mut rank = 0;
        let mut ranks = 0;
        // SAFETY: see above; MPI takes no arguments when it is given none.
        unsafe {
            let funneled = ffi::RSMPI_THREAD_FUNNELED;
            let none = ptr::null_mut();
            checked(ffi::MPI_Init_thread(none, ptr::null_mut(), funneled, &mut provided))?;
            if provided < funneled {
                return Err("this library must be called by the main thread alone".into());
            }
            let world = ffi::RSMPI_COMM_WORLD;
            checked(ffi::MPI_Comm_set_errhandler(world, ffi::RSMPI_ERRORS_RETURN))?;
            checked(ffi::MPI_Comm_rank(world, &mut rank))?;
            checked(ffi::MPI_Comm_size(world, &mut ranks))?;
        }
        Ok(World { rank: rank as Rank, ranks: ranks as u32, on_their_way: Vec::new() })
    }

    /// Serves requests until the end.
    pub(super) fn serve(&mut self, asks: &Receiver<Ask>) {
        let mut idle = 0;
        loop {
            let asked = if self.on_their_way.is_empty() {
                asks.recv().map_err(|_| TryRecvError::Disconnected)
            } else {
                asks.try_recv()
            };
            match asked {
                Ok(Ask::Post(post)) => {
                    self.begin(post);
                    idle = 0;
                    continue;
                }
                Ok(Ask::End) => break,
                Err(TryRecvError::Disconnected) => return,
                Err(TryRecvError::Empty) => {}
            }
            idle = if self.progress() { 0 } else { idle + 1 };
            // Others need the processor, too, where there are few cores.
            match idle {
                0 => {}
                1..100 => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(50)),
            }
        }
        // SAFETY: see above. Nothing can be done about an error of the last call.
        _ = unsafe { ffi::MPI_Finalize() };
    }

    fn begin(&mut self, mut post: Post) {
        // SAFETY: a constant of the library.
        let mut request = unsafe { ffi::RSMPI_REQUEST_NULL };
        let rank = post.rank as c_int;
        let tag = post.channel as c_int;
        // SAFETY: see above.
        let code = unsafe {
            let bytes = ffi::RSMPI_UINT8_T;
            let world = ffi::RSMPI_COMM_WORLD;
            if post.sends {
                let from = post.piece.memory.as_ptr().cast();
                let count = post.piece.filled as c_int;
                ffi::MPI_Isend(from, count, bytes, rank, tag, world, &mut request)
            } else {
                let to = post.piece.memory.as_mut_ptr().cast();
                ffi::MPI_Irecv(to, PIECE as c_int, bytes, rank, tag, world, &mut request)
            }
        };
        match checked(code) {
            Ok(()) => self.on_their_way.push(OnItsWay { request, post }),
            Err(what) => post.fail(what),
        }
    }

    /// Ends all posts that MPI has done with. Returns whether there were any.
    fn progress(&mut self) -> bool {
        let before = self.on_their_way.len();
        let mut nth = 0;
        while nth < self.on_their_way.len() {
            match self.on_their_way[nth].test() {
                Ok(None) => nth += 1,
                Ok(Some(count)) => {
                    self.on_their_way.remove(nth).post.end(count);
                }
                Err(what) => self.on_their_way.remove(nth).post.fail(what),
            }
        }
        self.on_their_way.len() < before
    }
}

impl OnItsWay {
    /// `None` while MPI still needs the piece; then the number of bytes that were received.
    fn test(&mut self) -> Result<Option<usize>, String> {
        let mut status = std::mem::MaybeUninit::<ffi::MPI_Status>::zeroed();
        let mut is_done = 0;
        let mut count = 0;
        // SAFETY: see `World`; zeros are a status.
        unsafe {
            checked(ffi::MPI_Test(&mut self.request, &mut is_done, status.as_mut_ptr()))?;
            if is_done == 0 {
                return Ok(None);
            }
            if !self.post.sends {
                checked(ffi::MPI_Get_count(status.as_ptr(), ffi::RSMPI_UINT8_T, &mut count))?;
            }
        }
        Ok(Some(count as usize))
    }
}

impl Post {
    /// Replies that the piece is done. A piece that receives has `count` bytes.
    fn end(self, count: usize) {
        let Post { sends, mut piece, place, reply, .. } = self;
        if !sends {
            piece.filled = count;
        }
        // A caller that gave up does not listen any more.
        _ = reply.send(Reply { sends, place, done: Ok(piece) });
    }

    fn fail(self, what: String) {
        _ = self.reply.send(Reply { sends: self.sends, place: self.place, done: Err(what) });
    }
}
