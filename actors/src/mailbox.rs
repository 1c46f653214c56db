//! One edge of the ring: one sender, one receiver, room for every credit its messages carry.
//!
//! Sending never waits. A message travels with the credits it needs (slots, a visit), so a
//! mailbox with room for all credits is never full, and a full one is a bug that panics. flume
//! keeps queued messages when a receiver dies, and with them slots; the [`Inbox`] drains itself.

use flume::{Receiver, Sender, TrySendError};

/// The sending end.
#[derive(Debug)]
pub struct Outbox<T> {
    name: &'static str,
    sender: Sender<T>,
}

/// The receiving end. Not `Clone`: its owner alone receives.
#[derive(Debug)]
pub struct Inbox<T> {
    name: &'static str,
    receiver: Receiver<T>,
}

/// An edge with room for `capacity` messages.
pub fn mailbox<T>(name: &'static str, capacity: usize) -> (Outbox<T>, Inbox<T>) {
    let (sender, receiver) = flume::bounded(capacity);
    (Outbox { name, sender }, Inbox { name, receiver })
}

impl<T> Outbox<T> {
    /// Puts a message in. If the receiver is gone, the ring is ending, and the message is dropped.
    ///
    /// # Panics
    /// The mailbox is full, because a message was sent without the credit that it needs.
    pub fn send(&self, message: T) {
        if let Err(TrySendError::Full(_)) = self.sender.try_send(message) {
            panic!("mailbox {} is full: a message without its credit", self.name);
        }
    }
}

impl<T> Inbox<T> {
    /// The edge's name.
    pub fn name(&self) -> &'static str {
        self.name
    }

    /// The next message. Waits for ever when the sender is gone: the end of a ring is a message
    /// or the kill switch, never a closed edge.
    pub async fn recv(&mut self) -> T {
        match self.receiver.recv_async().await {
            Ok(message) => message,
            Err(_) => std::future::pending().await,
        }
    }
}

impl<T> Drop for Inbox<T> {
    fn drop(&mut self) {
        self.receiver.drain();
    }
}
