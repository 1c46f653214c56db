//! The known hangs, each as a small model of the ring with one rule broken.
//!
//! The real types do not let these be written (a pool has one taker, a landing block travels with
//! work that needs no norm, facts are kept and not queued), so each is a few tasks on the same
//! mechanics and the same executor. Each stands beside its sound variant.

use std::sync::Arc;

use l2l_actors::mailbox::{Inbox, Outbox, mailbox};
use l2l_actors::pool::{Content, Held, Pool};
use l2l_actors::schedule::{BlockId, BoundaryId};
use l2l_actors::virtual_time::{VirtualLanes, World};
use tokio::sync::{Mutex, Semaphore};

fn world() -> World {
    World::new(Arc::new(VirtualLanes::new(|_| std::time::Duration::ZERO)))
}

fn boundary(m: u32) -> Content {
    Content::Boundary(BoundaryId(0), m)
}

/// One micro-batch after the other: the prefetcher takes an input slot ahead, the executor takes
/// an output slot to compute and frees the input after. With `shared`, both take from one pool.
fn activations(shared: bool) -> Result<(), Vec<String>> {
    const MICRO_BATCHES: u32 = 4;
    let mut world = world();
    let inputs = Arc::new(Mutex::new(Pool::new("activations", 2)));
    let outputs = match shared {
        true => inputs.clone(),
        false => Arc::new(Mutex::new(Pool::new("outputs", 1))),
    };
    let (to_executor, mut brought): (Outbox<Held>, Inbox<Held>) = mailbox("inputs", 2);
    world.spawn("prefetcher".into(), async move {
        for m in 0..MICRO_BATCHES {
            let held = inputs.lock().await.acquire(boundary(m)).await;
            to_executor.send(held);
        }
    });
    world.spawn("executor".into(), async move {
        for m in 0..MICRO_BATCHES {
            let _input = brought.recv().await;
            let _output = outputs.lock().await.acquire(boundary(m)).await;
        }
    });
    world.run()
}

#[test]
fn one_activation_pool_with_two_takers_hangs() {
    assert_eq!(activations(false), Ok(()));
    let left = activations(true).expect_err("both hold what the other waits for");
    assert_eq!(left, ["prefetcher", "executor"]);
}

/// Blocks by turns for two devices, each of which needs the one before to be computed. A slot is
/// free when its block is computed. With `by_device`, each device takes slots for its own blocks;
/// without, one fetcher takes them in the order of all blocks.
fn reads(by_device: bool) -> Result<(), Vec<String>> {
    const BLOCKS: usize = 4;
    let mut world = world();
    let slots = Arc::new(Mutex::new(Pool::new("reads", 2)));
    let computed: Arc<Vec<Semaphore>> = Arc::new((0..BLOCKS).map(|_| Semaphore::new(0)).collect());
    let content = |block: usize| Content::Block(BlockId(block as u32), 0);
    let mut outboxes = Vec::new();
    let mut executors = Vec::new();
    for _ in 0..2 {
        let (to_executor, staged): (Outbox<Held>, Inbox<Held>) = mailbox("staged", BLOCKS);
        outboxes.push(to_executor);
        executors.push(staged);
    }
    let takers: Vec<Vec<usize>> = match by_device {
        true => vec![(1..BLOCKS).step_by(2).collect(), (0..BLOCKS).step_by(2).collect()],
        false => vec![(0..BLOCKS).collect()],
    };
    let outboxes = Arc::new(outboxes);
    for blocks in takers {
        let slots = slots.clone();
        let outboxes = outboxes.clone();
        world.spawn(format!("taker of {blocks:?}"), async move {
            for block in blocks {
                let held = slots.lock().await.acquire(content(block)).await;
                outboxes[block % 2].send(held);
            }
        });
    }
    for (device, mut staged) in executors.into_iter().enumerate() {
        let computed = computed.clone();
        world.spawn(format!("executor {device}"), async move {
            for block in (device..BLOCKS).step_by(2) {
                let _slot = staged.recv().await;
                if block > 0 {
                    computed[block - 1].acquire().await.expect("never closed").forget();
                }
                computed[block].add_permits(1);
            }
        });
    }
    world.run()
}

#[test]
fn one_pool_of_reads_with_a_taker_for_each_device_hangs() {
    assert_eq!(reads(false), Ok(()));
    let left = reads(true).expect_err("one device holds all slots and needs the other's block");
    assert_eq!(left, ["taker of [0, 2]", "executor 0", "executor 1"]);
}

/// The norm needs all gradients. With `held`, a gradient waits for it in its landing block;
/// without, it is joined into its region and the landing block goes back.
fn landing(held: bool, blocks: u32, landing_blocks: u32) -> Result<(), Vec<String>> {
    let mut world = world();
    let (to_optimizer, mut reduced) = mailbox("reduced", blocks as usize);
    world.spawn("reducer".into(), async move {
        let mut pool = Pool::new("reduced", landing_blocks);
        for block in 0..blocks {
            let slot = pool.acquire(Content::Gradient(BlockId(block).into(), 0)).await;
            to_optimizer.send(held.then_some(slot));
        }
    });
    world.spawn("optimizer".into(), async move {
        let mut waiting = Vec::new();
        for _ in 0..blocks {
            waiting.push(reduced.recv().await);
        }
    });
    world.run()
}

#[test]
fn gradients_that_wait_for_the_norm_in_landing_blocks_hang() {
    for blocks in 2..=6 {
        for landing_blocks in 1..blocks {
            assert_eq!(landing(false, blocks, landing_blocks), Ok(()));
            let left = landing(true, blocks, landing_blocks).expect_err("no block is ever free");
            assert_eq!(left, ["reducer", "optimizer"]);
        }
        assert_eq!(landing(true, blocks, blocks), Ok(()), "with one for each it ends");
    }
}

/// The loop prefetcher → optimizer → prefetcher. With `room` for that many facts on the way back
/// the optimizer waits to tell; without, facts are kept and telling never waits.
fn back_edge(room: Option<usize>, blocks: usize) -> Result<(), Vec<String>> {
    let mut world = world();
    let forward = Arc::new(Semaphore::new(1)); // room of the forward edge
    let (to_optimizer, mut gradients) = mailbox("gradients", blocks);
    let (back, facts) = flume::bounded(room.unwrap_or(2 * blocks));
    let room_ahead = forward.clone();
    world.spawn("prefetcher".into(), async move {
        for _step in 0..2 {
            for block in 0..blocks {
                room_ahead.acquire().await.expect("never closed").forget();
                to_optimizer.send(block);
            }
            for _ in 0..blocks {
                facts.recv_async().await.expect("the optimizer tells all");
            }
        }
    });
    world.spawn("optimizer".into(), async move {
        for _ in 0..2 * blocks {
            let block = gradients.recv().await;
            back.send_async(block).await.expect("the prefetcher listens");
            forward.add_permits(1);
        }
    });
    world.run()
}

#[test]
fn a_back_edge_with_room_for_one_hangs() {
    assert_eq!(back_edge(None, 4), Ok(()));
    let left = back_edge(Some(1), 4).expect_err("the prefetcher waits forward, the optimizer back");
    assert_eq!(left, ["prefetcher", "optimizer"]);
}
