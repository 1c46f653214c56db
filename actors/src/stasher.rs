//! The downloading side of the activation loop: each boundary goes into the stash, and becomes a
//! fact.

use std::sync::Arc;

use async_trait::async_trait;

use crate::cause::BoxedError;
use crate::context::Context;
use crate::facts::Fact;
use crate::mailbox::Inbox;
use crate::messages::{Flow, Outputs};
use crate::operation::{Order, Step};
use crate::pool::Content;
use crate::task::Actor;
use crate::work::{Placed, Work};

pub(crate) struct Stasher {
    pub(crate) context: Context,
    pub(crate) outputs: Inbox<Flow<Outputs>>,
    pub(crate) step: Option<Arc<Step>>,
}

#[async_trait]
impl Actor for Stasher {
    async fn run(&mut self) -> Result<(), BoxedError> {
        loop {
            match self.context.recv(&mut self.outputs, None).await? {
                Flow::Begin(step) => self.step = Some(step),
                Flow::Datum(outputs) => self.stash(outputs),
                Flow::Stop => return Ok(()),
                Flow::End(_) => unreachable!("nothing is behind the stasher"),
            }
        }
    }
}

impl Stasher {
    fn stash(&self, outputs: Outputs) {
        let step = self.step.as_ref().expect("a step begins before its outputs");
        let visit = step.plan.visit(outputs.device_visit);
        let micro_batch = outputs.micro_batch;
        for (&boundary, held) in visit.writes.iter().zip(outputs.boundaries) {
            let content = Content::Boundary(boundary, micro_batch);
            let slot = held.slot(content);
            let work = Work::DownloadBoundary { micro_batch, outputs: Placed { boundary, slot } };
            let mut order = Order::at(step, visit, work);
            order.waits = vec![outputs.computed.clone()];
            order.holds = vec![held];
            order.raises = vec![Fact::Stashed(boundary, micro_batch)];
            self.context.queue(order);
        }
    }
}
