//! A simulated disk: from the calls of a process, what may be left of them when the power fails.
//!
//! Assumed, as POSIX allows and ext4 and others may do:
//!
//! - What a file holds is safe when that file was synced, and its entry in a folder when that
//!   folder was synced. Neither implies the other.
//! - Of what was written to a file since, all, nothing or parts may be there: the last write torn
//!   at a sector, with or without zeros behind it; later writes without an earlier one; every
//!   other page. A file that was renamed and not synced may be empty.
//! - Of the entries that changed since, any that were first may be there, over all folders or in
//!   one folder alone. A rename happens or does not.
//! - What was synced stays. (Damage is other tests' matter.)

use std::cell::RefCell;
use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::fs;
use std::hash::{Hash, Hasher};
use std::path::Path;
use std::sync::Arc;

use crate::journal::Record;

/// Files may be torn inside of this many bytes only if they are smaller.
const SECTOR: usize = 512;
const PAGE: usize = 4096;

/// What is left of the writes since a file's last sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Left {
    All,
    Nothing,
    /// The last write is torn, and the file ends there.
    Torn,
    /// The last write is torn, and zeros follow.
    Zeros,
    /// The first write is lost.
    Late,
    /// Every other page.
    Pages,
}

enum Write {
    Data(usize, Vec<u8>),
    Size(usize),
    /// The file is not shorter than this.
    Reserved(usize),
}

/// The bytes of a file.
pub(crate) struct Content {
    bytes: Vec<u8>,
    digest: u64,
}

/// All paths, with the contents of files; `None` for a folder.
pub(crate) type Tree = BTreeMap<String, Option<Arc<Content>>>;

#[derive(Default)]
struct File {
    safe: Vec<u8>,
    writes: Vec<Write>,
    contents: RefCell<HashMap<Left, Arc<Content>>>,
}

impl File {
    fn write(&mut self, write: Write) {
        self.writes.push(write);
        self.contents.borrow_mut().clear();
    }

    fn content(&self, left: Left) -> Arc<Content> {
        let make = || {
            let bytes = self.bytes(left);
            Arc::new(Content { digest: digest(&bytes), bytes })
        };
        self.contents.borrow_mut().entry(left).or_insert_with(make).clone()
    }

    fn bytes(&self, left: Left) -> Vec<u8> {
        let mut bytes = self.safe.clone();
        let is_data = |write: &Write| matches!(write, Write::Data(..));
        let last = self.writes.iter().rposition(is_data);
        let first = self.writes.iter().position(is_data);
        for (nth, write) in self.writes.iter().enumerate().filter(|_| left != Left::Nothing) {
            let (at, data) = match write {
                Write::Size(size) => {
                    bytes.resize(*size, 0);
                    continue;
                }
                Write::Reserved(size) => {
                    bytes.resize(bytes.len().max(*size), 0);
                    continue;
                }
                Write::Data(at, data) => (*at, data),
            };
            let end = at + data.len();
            let is_last = Some(nth) == last;
            if left != Left::Torn || !is_last {
                bytes.resize(bytes.len().max(end), 0);
            }
            let half = data.len() / 2;
            let half = if half >= SECTOR { half / SECTOR * SECTOR } else { half };
            match left {
                Left::Torn if is_last => {
                    bytes.resize(bytes.len().max(at + half), 0);
                    bytes[at..][..half].copy_from_slice(&data[..half]);
                }
                Left::Zeros if is_last => bytes[at..][..half].copy_from_slice(&data[..half]),
                Left::Late if Some(nth) == first => {}
                Left::Pages => {
                    let odd = (at..end).filter(|place| place / PAGE % 2 == 1);
                    odd.for_each(|place| bytes[place] = data[place - at]);
                }
                _ => bytes[at..end].copy_from_slice(data),
            }
        }
        bytes
    }
}

enum Change {
    Add(String, usize),
    Move(String, String),
    Remove(String),
}

#[derive(Default)]
struct Folder {
    safe: BTreeMap<String, usize>,
    /// The changes since the last sync, by their number on the disk.
    changes: Vec<(u64, Change)>,
}

impl Folder {
    fn entries(&self, is_left: impl Fn(u64) -> bool) -> BTreeMap<String, usize> {
        let mut entries = self.safe.clone();
        for (_, change) in self.changes.iter().filter(|(number, _)| is_left(*number)) {
            match change {
                Change::Add(name, node) => drop(entries.insert(name.clone(), *node)),
                Change::Remove(name) => drop(entries.remove(name)),
                Change::Move(from, to) => {
                    if let Some(node) = entries.remove(from) {
                        entries.insert(to.clone(), node);
                    }
                }
            }
        }
        entries
    }
}

enum Node {
    File(File),
    Folder(Folder),
}

/// See the [module](self).
pub(crate) struct Disk {
    /// The first one is the root.
    nodes: Vec<Node>,
    inodes: HashMap<u64, usize>,
    changes: u64,
    /// The digests of the checkpoints that were complete, by their paths.
    complete: HashSet<(String, u64)>,
}

impl Disk {
    pub(crate) fn new() -> Disk {
        let nodes = vec![Node::Folder(Folder::default())];
        Disk { nodes, inodes: HashMap::new(), changes: 0, complete: HashSet::new() }
    }

    fn folder(&mut self, node: usize) -> &mut Folder {
        match &mut self.nodes[node] {
            Node::Folder(folder) => folder,
            Node::File(_) => panic!("node {node} is a file"),
        }
    }

    fn file(&mut self, inode: u64) -> &mut File {
        match &mut self.nodes[self.inodes[&inode]] {
            Node::File(file) => file,
            Node::Folder(_) => panic!("inode {inode} is a folder"),
        }
    }

    /// The folder that a path is in, and its name there.
    fn place<'p>(&mut self, path: &'p str) -> (usize, &'p str) {
        let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
        let names = folders.split('/').filter(|name| !name.is_empty());
        (names.fold(0, |node, name| self.folder(node).entries(|_| true)[name]), name)
    }

    fn change(&mut self, folder: usize, change: Change) {
        self.changes += 1;
        let number = self.changes;
        self.folder(folder).changes.push((number, change));
    }

    /// Makes a call.
    pub(crate) fn apply(&mut self, record: &Record) {
        let is_done = record.mark.is_none() || record.mark == Some('!') && !record.data.is_empty();
        if !is_done {
            return;
        }
        match &record.name[..] {
            "create" | "mkdir" => {
                let node = match &record.name[..] {
                    "create" => Node::File(File::default()),
                    _ => Node::Folder(Folder::default()),
                };
                self.nodes.push(node);
                let node = self.nodes.len() - 1;
                self.inodes.insert(record.inode, node);
                let (folder, name) = self.place(&record.path);
                self.change(folder, Change::Add(name.into(), node));
            }
            "truncate" => self.file(record.inode).write(Write::Size(0)),
            "resize" => self.file(record.inode).write(Write::Size(record.at as usize)),
            "fallocate" => self.file(record.inode).write(Write::Reserved(record.at as usize)),
            "link" => {
                let to = record.other.as_ref().expect("a new path");
                let (folder, name) = self.place(to);
                let node = self.inodes[&record.inode];
                self.change(folder, Change::Add(name.into(), node));
            }
            "write" => {
                let write = Write::Data(record.at as usize, record.data.clone());
                self.file(record.inode).write(write);
            }
            "rename" => {
                let to = record.other.as_ref().expect("a new path");
                let (folder, from) = self.place(&record.path);
                let (other, name) = self.place(to);
                assert!(folder == other, "renames stay in a folder: {}", record.told());
                self.change(folder, Change::Move(from.into(), name.into()));
                if is_checkpoint(to) {
                    let whole = below(&self.tree(&|_, _| true, &|_| Left::All), to);
                    self.complete.insert((to.clone(), whole));
                }
            }
            "remove" => {
                let (folder, name) = self.place(&record.path);
                self.change(folder, Change::Remove(name.into()));
            }
            "sync" if record.path.is_empty() => self.sync(0),
            "sync" => self.sync(self.inodes[&record.inode]),
            _ => {}
        }
    }

    fn sync(&mut self, node: usize) {
        match &mut self.nodes[node] {
            Node::File(file) => {
                file.safe = file.bytes(Left::All);
                file.writes.clear();
                file.contents.borrow_mut().clear();
            }
            Node::Folder(folder) => {
                folder.safe = folder.entries(|_| true);
                folder.changes.clear();
            }
        }
    }

    /// What is there if these changes are left, and this of each file.
    fn tree(&self, is_left: &dyn Fn(u64, usize) -> bool, left: &dyn Fn(usize) -> Left) -> Tree {
        let mut tree = Tree::new();
        let mut folders = vec![(String::new(), 0)];
        while let Some((path, node)) = folders.pop() {
            let Node::Folder(folder) = &self.nodes[node] else { unreachable!("only folders") };
            for (name, entry) in folder.entries(|number| is_left(number, node)) {
                let path = if path.is_empty() { name } else { format!("{path}/{name}") };
                match &self.nodes[entry] {
                    Node::File(file) => drop(tree.insert(path, Some(file.content(left(entry))))),
                    Node::Folder(_) => {
                        tree.insert(path.clone(), None);
                        folders.push((path, entry));
                    }
                }
            }
        }
        tree
    }

    /// What is there while the power is on.
    pub(crate) fn now(&self) -> Tree {
        self.tree(&|_, _| true, &|_| Left::All)
    }

    /// Gives all that may be left if the power fails now, with what it is.
    pub(crate) fn after_power_loss(&self, each: &mut dyn FnMut(&str, Tree)) {
        let mut changes = Vec::new();
        let mut files = Vec::new();
        for (nth, node) in self.nodes.iter().enumerate() {
            match node {
                Node::File(file) if !file.writes.is_empty() => files.push(nth),
                Node::Folder(folder) => {
                    changes.extend(folder.changes.iter().map(|(number, _)| (*number, nth)));
                }
                Node::File(_) => {}
            }
        }
        changes.sort();
        let folders: HashSet<usize> = changes.iter().map(|(_, folder)| *folder).collect();
        type Names = Box<dyn Fn(u64, usize) -> bool>;
        let mut names: Vec<(String, Names)> = vec![("all entries".into(), Box::new(|_, _| true))];
        for (nth, (end, _)) in changes.iter().copied().enumerate() {
            let what = format!("{nth} of {} entries", changes.len());
            names.push((what, Box::new(move |number, _| number < end)));
        }
        for only in folders.iter().copied().filter(|_| folders.len() > 1) {
            let what = format!("entries of folder {only}");
            names.push((what.clone(), Box::new(move |_, folder| folder == only)));
            names.push((format!("all but {what}"), Box::new(move |_, folder| folder != only)));
        }
        type Data = Box<dyn Fn(usize) -> Left>;
        let mut data: Vec<(String, Data)> = Vec::new();
        let kinds = [Left::All, Left::Nothing, Left::Torn, Left::Zeros, Left::Late, Left::Pages];
        for kind in kinds.into_iter().take(if files.is_empty() { 1 } else { kinds.len() }) {
            data.push((format!("{kind:?} of the data"), Box::new(move |_| kind)));
        }
        for only in files.iter().copied().filter(|_| files.len() > 1) {
            for (one, others) in [(Left::Nothing, Left::All), (Left::All, Left::Nothing)] {
                let left = move |file| if file == only { one } else { others };
                data.push((format!("{one:?} of file {only}, {others:?} else"), Box::new(left)));
            }
        }
        for (entries, is_left) in &names {
            for (contents, left) in &data {
                each(&format!("{entries}, {contents}"), self.tree(is_left, left));
            }
        }
    }

    /// A checkpoint that is there under its name, and not as it was when it got that name.
    pub(crate) fn incomplete(&self, tree: &Tree) -> Option<String> {
        let mut names = tree.keys().filter(|path| is_checkpoint(path));
        let is_bad =
            |path: &&String| !self.complete.contains(&((*path).clone(), below(tree, path)));
        names.find(is_bad).cloned()
    }
}

/// Whether a path is that of a checkpoint which is not being written or replaced.
pub(crate) fn is_checkpoint(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or(path);
    let step = name.strip_prefix("step-").or_else(|| name.strip_prefix("best-"));
    step.is_some_and(|step| step.chars().all(|digit| digit.is_ascii_digit()))
}

fn digest(of: &(impl Hash + ?Sized)) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

/// The digest of a tree.
pub(crate) fn digest_of(tree: &Tree) -> u64 {
    let all: Vec<_> =
        tree.iter().map(|(path, file)| (path, file.as_ref().map(|f| f.digest))).collect();
    digest(&all)
}

/// The digest of what is below a path.
fn below(tree: &Tree, path: &str) -> u64 {
    let folder = format!("{path}/");
    let inside = tree.iter().filter_map(|(path, file)| Some((path.strip_prefix(&folder)?, file)));
    digest_of(&inside.map(|(path, file)| (path.to_string(), file.clone())).collect())
}

/// Writes a tree to a folder, which exists.
pub(crate) fn write(tree: &Tree, to: &Path) {
    for (path, content) in tree {
        match content {
            None => fs::create_dir(to.join(path)).expect("a folder of ours"),
            Some(content) => fs::write(to.join(path), &content.bytes).expect("room on a disk"),
        }
    }
}

/// Reads a folder as a tree.
pub(crate) fn read(folder: &Path) -> Tree {
    let mut tree = Tree::new();
    let mut open = vec![folder.to_path_buf()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(next).expect("a folder of ours") {
            let path = entry.expect("a folder of ours").path();
            let name = path.strip_prefix(folder).expect("it is below").display().to_string();
            if path.is_dir() {
                tree.insert(name, None);
                open.push(path);
            } else {
                let bytes = fs::read(&path).expect("a file of ours");
                tree.insert(name, Some(Arc::new(Content { digest: digest(&bytes), bytes })));
            }
        }
    }
    tree
}
