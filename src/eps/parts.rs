//! The EPS of a run with several ranks: each has a part of every block.
//!
//! Blocks are cut between chunks of the gradient norm's sums, so the sums of all parts are those of
//! one process. Between steps a block is read whole: each rank sends its part. Either all ranks
//! read the same block, or the first rank asks the others for it ([`RankParts::first_alone`]).

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use l2l_actors::schedule::BlockId;

use super::{BlockRun, Eps};
use crate::error::Error;
use crate::fabric::parts::Parts;
use crate::fabric::{Channel, Exchanges, Lost};
use crate::models::{BlockTensors, Model};
use crate::optimizers::{BlockStates, StateLayout, UpdateRule, chunks};
use crate::tensor::ALIGNED;

/// How blocks and their optimizer states are cut into parts, and the exchanges between ranks.
pub(crate) struct RankParts {
    pub(crate) exchanges: Arc<Exchanges>,
    pub(crate) tensors: Vec<BlockTensors>,
    /// How each block is cut, in elements.
    cuts: Vec<Parts>,
    /// The optimizer's states of the whole blocks.
    states: StateLayout,
    /// How each state of each block is cut, in floats.
    state_cuts: Vec<Vec<Parts>>,
    /// True on the first rank while it asks the others for their parts.
    asks: AtomicBool,
}

/// Cuts a block of these tensors into about equal parts, each of whole chunks.
pub(crate) fn cut(tensors: &BlockTensors, ranks: u32) -> Parts {
    let len = tensors.len();
    let ranks = ranks as usize;
    let frozen = chunks(tensors.frozen()).map(|chunk| chunk.start + tensors.trained_len());
    let starts = chunks(tensors.trained()).map(|chunk| chunk.start).chain(frozen);
    let starts: Vec<usize> = starts.filter(|start| start % ALIGNED == 0).collect();
    let cut = |rank: usize| {
        let at = starts.partition_point(|start| start * ranks < len * rank);
        starts.get(at).copied().unwrap_or(len)
    };
    Parts::new((1..ranks).map(cut).chain([len]).collect())
}

impl RankParts {
    pub(crate) fn new(
        exchanges: Arc<Exchanges>,
        model: &Model,
        rule: &dyn UpdateRule,
    ) -> RankParts {
        let ranks = exchanges.ranks();
        let cuts: Vec<Parts> = model.blocks.iter().map(|block| cut(block, ranks)).collect();
        let states = StateLayout::new(rule, &model.blocks);
        let blocks = model.blocks.iter().zip(&cuts).enumerate();
        let state_cuts = blocks.map(|(index, (block, cut))| {
            let of_rank = |rank| BlockStates::new(rule, block.part(cut.of(rank)).trained());
            let of_ranks: Vec<BlockStates> = (0..ranks).map(of_rank).collect();
            let of_state = |(state, &len): (usize, &usize)| {
                let mut end = 0;
                let ends = of_ranks.iter().map(|states| {
                    end += states.len(state);
                    end
                });
                let parts = Parts::new(ends.collect());
                assert_eq!(parts.len(), len, "the states of pieces are those of the block");
                parts
            };
            states.of(index).lens().iter().enumerate().map(of_state).collect()
        });
        let state_cuts = state_cuts.collect();
        let tensors = model.blocks.clone();
        let asks = AtomicBool::new(false);
        RankParts { exchanges, tensors, cuts, states, state_cuts, asks }
    }

    /// The optimizer's states of whole blocks.
    pub(crate) fn layout(&self) -> &StateLayout {
        &self.states
    }

    /// The optimizer's states of a whole block.
    pub(crate) fn states(&self, id: BlockId) -> &BlockStates {
        self.states.of(id.0 as usize)
    }

    /// How a block is cut.
    pub(crate) fn of(&self, id: BlockId) -> &Parts {
        &self.cuts[id.0 as usize]
    }

    /// How the gradient of a block is cut.
    pub(crate) fn of_trained(&self, id: BlockId) -> Parts {
        self.of(id).clipped(self.tensors[id.0 as usize].trained_len())
    }

    /// How a run of a block is cut.
    pub(super) fn of_run(&self, id: BlockId, run: BlockRun) -> Parts {
        match run {
            BlockRun::Parameters => self.of(id).clone(),
            BlockRun::State(state) => {
                let cuts = &self.state_cuts[id.0 as usize];
                let none = || Parts::new(vec![0; self.exchanges.ranks() as usize]);
                cuts.get(state).cloned().unwrap_or_else(none)
            }
            BlockRun::Older => self.of_trained(id),
            BlockRun::Feedback(_) => unreachable!("the EPS cuts error feedback by group"),
        }
    }

    /// This rank's part of a block.
    pub(crate) fn own(&self, id: BlockId) -> Range<usize> {
        self.of(id).of(self.exchanges.rank())
    }

    /// The tensors of this rank's parts, block by block.
    pub(crate) fn own_tensors(&self) -> Vec<BlockTensors> {
        let blocks = self.tensors.iter().zip(0..);
        blocks.map(|(tensors, id)| tensors.part(self.own(BlockId(id)))).collect()
    }

    /// A run of a whole block, from this rank's part of it.
    pub(super) fn all_gather(
        &self,
        id: BlockId,
        run: BlockRun,
        parts: &Parts,
        own: &[f32],
    ) -> Result<Vec<f32>, Error> {
        if self.asks.load(Relaxed) && self.exchanges.rank() == 0 {
            self.say(Said::Asks(id, run))?;
        }
        let mut whole = vec![0.0_f32; parts.len()];
        whole[parts.of(self.exchanges.rank())].copy_from_slice(own);
        let bytes = bytemuck::cast_slice_mut(&mut whole);
        let parts = parts.in_bytes(size_of::<f32>());
        let subject = u64::from(id.0) << 32 | run.index() as u64;
        let done = self.exchanges.all_gather(Channel::Control, subject, &parts, bytes, &|| ());
        done.map_err(lost)?;
        Ok(whole)
    }

    /// Does work on the first rank alone. The other ranks send their parts of the blocks that the
    /// work reads.
    ///
    /// # Errors
    /// The work failed: all ranks get the error.
    pub(super) fn first_alone(
        &self,
        eps: &Eps,
        work: impl FnOnce() -> Result<(), Error>,
    ) -> Result<(), Error> {
        if self.exchanges.rank() == 0 {
            self.asks.store(true, Relaxed);
            let done = work();
            self.asks.store(false, Relaxed);
            let problem = done.as_ref().err().map(Error::to_string);
            self.say(Said::Ends(problem))?;
            return done;
        }
        loop {
            match self.hear()? {
                Said::Asks(id, run) => eps.read_with(id, run, |_| ())?,
                Said::Ends(None) => return Ok(()),
                Said::Ends(Some(problem)) => {
                    return Err(Error::System(format!("rank 0: {problem}")));
                }
            }
        }
    }

    fn say(&self, said: Said) -> Result<(), Error> {
        self.exchanges.meet(&said.written()).map_err(lost)?;
        Ok(())
    }

    fn hear(&self) -> Result<Said, Error> {
        let all = self.exchanges.meet(&[]).map_err(lost)?;
        Ok(Said::read(&all[0]))
    }
}

/// A message of the first rank to the others.
enum Said {
    /// The work reads this run of a block.
    Asks(BlockId, BlockRun),
    /// The work has ended, with a problem if it failed.
    Ends(Option<String>),
}

impl Said {
    fn written(&self) -> Vec<u8> {
        match self {
            Said::Asks(id, run) => {
                let words = [0, id.0, run.index() as u32];
                words.iter().flat_map(|word| word.to_le_bytes()).collect()
            }
            Said::Ends(None) => vec![1],
            Said::Ends(Some(problem)) => [&[2], problem.as_bytes()].concat(),
        }
    }

    fn read(bytes: &[u8]) -> Said {
        match bytes {
            [1] => Said::Ends(None),
            [2, problem @ ..] => Said::Ends(Some(String::from_utf8_lossy(problem).into_owned())),
            words => {
                let word = |nth: usize| {
                    let bytes = words[4 * nth..][..4].try_into().expect("four bytes");
                    u32::from_le_bytes(bytes)
                };
                Said::Asks(BlockId(word(1)), BlockRun::of_index(word(2) as usize))
            }
        }
    }
}

/// The last step after which all ranks have a state on file. A kill may leave some ranks one step
/// ahead: these go back to the state before.
///
/// # Errors
/// A rank, perhaps this one, cannot read its states; or some ranks have no state, or states of
/// another run.
pub(crate) fn agreed_step(
    exchanges: &Exchanges,
    own: Result<Option<u64>, &Error>,
) -> Result<Option<u64>, Error> {
    let own = serde_json::to_vec(&own.map_err(Error::to_string)).expect("it is plain data");
    let mut steps = Vec::new();
    for (rank, said) in exchanges.meet(&own).map_err(lost)?.iter().enumerate() {
        let of_rank: Result<Option<u64>, String> =
            serde_json::from_slice(said).map_err(Error::system)?;
        steps.push(of_rank.map_err(|what| Error::System(format!("rank {rank}: {what}")))?);
    }
    agreed(&steps)
}

/// The step that [`agreed_step`] gives, from the newest step of each rank. `None` if no rank has
/// done a step and some have no state yet: then there is nothing to continue.
fn agreed(steps: &[Option<u64>]) -> Result<Option<u64>, Error> {
    let least = steps.iter().min().copied().flatten();
    let most = steps.iter().max().copied().flatten();
    match (least, most) {
        (Some(least), Some(most)) if most - least > 1 => {
            let problem = format_args!(
                "has states after steps {least} to {most} on different ranks: they are of \
                 different runs. Resume from a checkpoint, or name another folder"
            );
            Err(Error::config("eps.path", problem))
        }
        (None, Some(1..)) => {
            let without = steps.iter().filter(|step| step.is_none()).count();
            let problem = format_args!(
                "has no state of {without} of {} processes: start as many processes as the run \
                 had, resume from a checkpoint, or name another folder",
                steps.len()
            );
            Err(Error::config("eps.path", problem))
        }
        (least, _) => Ok(least),
    }
}

/// The error of an exchange between steps that did not end.
pub(crate) fn lost(lost: Lost) -> Error {
    Error::System(lost.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::models::families;

    /// Parts cover each block once, and the chunks of all parts are those of the block.
    #[test]
    fn parts_have_the_chunks_of_their_block() {
        let model = Model::new(families::preset("gpt-small").expect("there is one"));
        for ranks in 1..=5 {
            for tensors in &model.blocks {
                let parts = cut(tensors, ranks);
                assert_eq!(parts.len(), tensors.len());
                let mut found = Vec::new();
                for rank in 0..ranks {
                    let part = parts.of(rank);
                    let cut = tensors.part(part.clone());
                    assert_eq!(cut.len(), part.len());
                    let at = |chunk: Range<usize>| chunk.start + part.start..chunk.end + part.start;
                    found.extend(chunks(cut.trained()).map(at));
                }
                assert!(found.into_iter().eq(chunks(tensors.trained())));
            }
        }
    }

    /// Ranks agree on a state that all of them have. After a kill before the first step, a run
    /// begins again.
    #[test]
    fn ranks_agree_on_a_step() {
        let agree = |steps: &[Option<u64>]| agreed(steps).map_err(|error| error.to_string());
        assert_eq!(agree(&[None, None]), Ok(None));
        assert_eq!(agree(&[Some(0), None]), Ok(None));
        assert_eq!(agree(&[Some(3), Some(4), Some(3)]), Ok(Some(3)));
        assert!(agree(&[Some(1), None]).unwrap_err().contains("has no state of 1 of 2 processes"));
        assert!(agree(&[Some(3), Some(5)]).unwrap_err().contains("of different runs"));
    }
}
