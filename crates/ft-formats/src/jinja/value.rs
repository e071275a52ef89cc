//! Values of a running template, as Python has them. Lists and dicts are immutable: the sandbox of transformers also
//! forbids changes. Only namespaces can change; the interpreter stores them and a value has only their index, so values
//! never form a reference cycle.

use super::ast::{ForLoop, Macro};
use super::fail::{Fail, JinjaResult, charge, charge_items};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::collections::VecDeque;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

/// Deepest nesting of lists and dicts.
const DEPTH: u32 = 200;

#[derive(Clone)]
pub(super) enum Value {
    Undefined(Rc<UndefinedReason>),
    None,
    Bool(bool),
    Int(i128),
    Float(f64),
    Str(Arc<str>),
    /// Text that is escaped for HTML.
    Markup(Arc<str>),
    List(Rc<Seq>),
    Tuple(Rc<Seq>),
    /// A tuple of `groupby`, with the fields `grouper` and `list`.
    Group(Rc<Seq>),
    Dict(Rc<Dict>),
    Range(Rc<RangeValue>),
    View(View, Rc<Dict>),
    /// Gives its elements once.
    Iter(Rc<Iter>),
    /// By its number in the interpreter.
    Namespace(usize),
    Object(Rc<Object>),
}

/// Why a value is undefined.
pub(super) enum UndefinedReason {
    Name(Arc<str>),
    Attribute(String, Arc<str>),
    Element(String, String),
    Hint(String),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum View {
    Keys,
    Values,
    Items,
}

pub(super) struct Seq {
    pub items: Vec<Value>,
    depth: u32,
}

pub(super) struct RangeValue {
    pub start: i128,
    pub stop: i128,
    pub step: i128,
    pub length: usize,
}

pub(super) struct Iter {
    items: RefCell<VecDeque<Value>>,
    /// One more than the depth of its contents when it was made.
    depth: u32,
    pub kind: &'static str,
    /// A lazy filter has read it ahead of time: what is left in it under jinja2 is not known.
    read_ahead: Cell<bool>,
}

pub(super) enum Object {
    Macro {
        code: Arc<Macro>,
        scope: usize,
        name: Option<Arc<str>>,
    },
    Loop(Box<RefCell<Loop>>),
    Method(Value, &'static str),
    Function(&'static str),
    Cycler(Rc<Seq>, Cell<usize>),
    Joiner(Arc<str>, Cell<bool>),
}

/// The variable `loop`.
pub(super) struct Loop {
    pub source: LoopSource,
    pub index0: i128,
    pub length: Option<i128>,
    pub before: Option<Value>,
    pub current: Option<Value>,
    pub after: Option<Value>,
    pub depth0: i128,
    pub changed: Option<Vec<Value>>,
    /// The statement and the scope around it, if it is recursive.
    pub recursive: Option<(Arc<ForLoop>, usize)>,
}

/// The elements of a loop.
pub(super) enum LoopSource {
    Items(VecDeque<Value>, usize),
    Shared(Rc<Iter>),
}

impl LoopSource {
    pub(super) fn next(&mut self) -> JinjaResult<Option<Value>> {
        match self {
            Self::Items(items, _) => Ok(items.pop_front()),
            Self::Shared(iter) => iter.next(),
        }
    }
}

impl Seq {
    /// Errors: nested too deeply, or too much work.
    pub(super) fn new(items: Vec<Value>) -> JinjaResult<Rc<Self>> {
        charge_items(items.len())?;
        let depth = deeper(items.iter())?;
        Ok(Rc::new(Self { items, depth }))
    }
}

fn deeper<'a>(values: impl Iterator<Item = &'a Value>) -> JinjaResult<u32> {
    let depth = 1 + values.map(Value::depth).max().unwrap_or(0);
    if depth > DEPTH {
        Err(Fail::limit("a value is nested too deeply"))
    } else {
        Ok(depth)
    }
}

impl Iter {
    pub(super) fn next(&self) -> JinjaResult<Option<Value>> {
        if self.read_ahead.get() {
            return Err(Fail::unsupported(format!(
                "a {} that is used again after a filter has read it",
                self.kind
            )));
        }
        Ok(self.items.borrow_mut().pop_front())
    }
}

impl RangeValue {
    pub(super) fn get(&self, index: usize) -> i128 {
        self.start + self.step * index as i128
    }
}

/// Keys in the order in which they came.
#[derive(Default)]
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Entries by hash, once there are many.
    index: HashMap<u64, Vec<usize>>,
    depth: u32,
}

/// Entries that are looked through one by one.
const FEW: usize = 12;

impl Dict {
    /// A later pair replaces an earlier one with the same key. Errors: a key cannot be hashed.
    pub(super) fn new(pairs: impl IntoIterator<Item = (Value, Value)>) -> JinjaResult<Self> {
        let mut out = Self::default();
        for (key, value) in pairs {
            out.insert(key, value)?;
        }
        Ok(out)
    }

    pub(super) fn insert(&mut self, key: Value, value: Value) -> JinjaResult<()> {
        // An entry, its hash and its place.
        charge_items(4)?;
        self.depth = self.depth.max(deeper([&key, &value].into_iter())?);
        match self.find(&key)? {
            Some(at) => self.entries[at].1 = value,
            None => {
                let at = self.entries.len();
                self.entries.push((key, value));
                if at == FEW {
                    for (i, (key, _)) in self.entries.iter().enumerate() {
                        self.index.entry(hash_of(key)?).or_default().push(i);
                    }
                } else if at > FEW {
                    self.index.entry(hash_of(&self.entries[at].0)?).or_default().push(at);
                }
            }
        }
        Ok(())
    }

    fn find(&self, key: &Value) -> JinjaResult<Option<usize>> {
        charge(32)?;
        let hash = hash_of(key)?;
        let same = |at: usize| key.equals(&self.entries[at].0);
        if self.index.is_empty() {
            for at in 0..self.entries.len() {
                if same(at)? {
                    return Ok(Some(at));
                }
            }
            return Ok(None);
        }
        charge(64)?;
        for at in self.index.get(&hash).into_iter().flatten() {
            charge(8)?;
            if same(*at)? {
                return Ok(Some(*at));
            }
        }
        Ok(None)
    }

    /// Errors: the key cannot be hashed.
    pub(super) fn get(&self, key: &Value) -> JinjaResult<Option<&Value>> {
        Ok(self.find(key)?.map(|at| &self.entries[at].1))
    }

    pub(super) fn get_str(&self, key: &str) -> Option<&Value> {
        if self.index.is_empty() {
            let found = self.entries.iter().find(|(k, _)| k.as_str() == Some(key));
            return found.map(|(_, v)| v);
        }
        let hash = hash_of_str(key);
        let found = self.index.get(&hash)?.iter().map(|at| &self.entries[*at]);
        found.filter(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v).next()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &(Value, Value)> {
        self.entries.iter()
    }
}

fn hash_of_str(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    text.hash(&mut hasher);
    hasher.finish()
}

/// Equal values have equal hashes. Errors: lists and dicts have none.
pub(super) fn hash_of(value: &Value) -> JinjaResult<u64> {
    let mut hasher = DefaultHasher::new();
    match value {
        Value::Undefined(_) => 1u8.hash(&mut hasher),
        Value::None => 2u8.hash(&mut hasher),
        Value::Bool(b) => i128::from(*b).hash(&mut hasher),
        Value::Int(n) => n.hash(&mut hasher),
        Value::Float(x) => match whole(*x) {
            Some(n) => n.hash(&mut hasher),
            None => x.to_bits().hash(&mut hasher),
        },
        Value::Str(s) | Value::Markup(s) => {
            charge(s.len())?;
            return Ok(hash_of_str(s));
        }
        Value::Tuple(seq) | Value::Group(seq) => {
            for item in &seq.items {
                charge(40)?;
                hash_of(item)?.hash(&mut hasher);
            }
        }
        Value::List(_) | Value::Dict(_) => {
            return Err(Fail::failed(format!("unhashable type: '{}'", value.type_name())));
        }
        _ => return Err(Fail::unsupported(format!("a {} as a key", value.type_name()))),
    }
    Ok(hasher.finish())
}

/// The integer that a float is equal to.
pub(super) fn whole(x: f64) -> Option<i128> {
    (x.fract() == 0.0 && x.abs() < 1e38).then_some(x as i128)
}

impl Value {
    pub(super) fn str(text: impl Into<Arc<str>>) -> Self {
        Self::Str(text.into())
    }

    pub(super) fn list(items: Vec<Value>) -> JinjaResult<Self> {
        Ok(Self::List(Seq::new(items)?))
    }

    pub(super) fn tuple(items: Vec<Value>) -> JinjaResult<Self> {
        Ok(Self::Tuple(Seq::new(items)?))
    }

    pub(super) fn iter_of(items: Vec<Value>, kind: &'static str) -> JinjaResult<Self> {
        charge_items(items.len())?;
        // An iterator counts as one level; what it gives is checked where it is kept.
        let depth = deeper(items.iter())?;
        Ok(Self::Iter(Rc::new(Iter {
            items: RefCell::new(items.into()),
            depth,
            kind,
            read_ahead: Cell::new(false),
        })))
    }

    pub(super) fn undefined(why: UndefinedReason) -> Self {
        Self::Undefined(Rc::new(why))
    }

    pub(super) fn hint(text: impl Into<String>) -> Self {
        Self::undefined(UndefinedReason::Hint(text.into()))
    }

    /// Text, marked safe or not.
    pub(super) fn as_str(&self) -> Option<&str> {
        match self {
            Self::Str(s) | Self::Markup(s) => Some(s),
            _ => None,
        }
    }

    /// An integer; true and false are integers.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Self::Bool(b) => Some(i128::from(*b)),
            Self::Int(n) => Some(*n),
            _ => None,
        }
    }

    pub(super) fn as_float(&self) -> Option<f64> {
        match self {
            Self::Float(x) => Some(*x),
            _ => self.as_int().map(|n| n as f64),
        }
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Self::Undefined(_))
    }

    /// Levels of lists and dictionaries in the value.
    fn depth(&self) -> u32 {
        match self {
            Self::List(s) | Self::Tuple(s) | Self::Group(s) => s.depth,
            Self::Dict(d) | Self::View(_, d) => d.depth,
            Self::Iter(i) => i.depth,
            Self::Object(o) => match &**o {
                Object::Method(receiver, _) => 1 + receiver.depth(),
                Object::Cycler(items, _) => items.depth,
                // It must not be kept in a value that it could then hold.
                Object::Loop(_) => DEPTH,
                _ => 1,
            },
            _ => 0,
        }
    }

    /// The name of the type in Python's messages.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Int(_) => "int",
            Self::Float(_) => "float",
            Self::Str(_) => "str",
            Self::Markup(_) => "Markup",
            Self::List(_) => "list",
            Self::Tuple(_) => "tuple",
            Self::Group(_) => "_GroupTuple",
            Self::Dict(_) => "dict",
            Self::Range(_) => "range",
            Self::View(View::Keys, _) => "dict_keys",
            Self::View(View::Values, _) => "dict_values",
            Self::View(View::Items, _) => "dict_items",
            Self::Iter(i) => i.kind,
            Self::Namespace(_) => "TemplateNamespace",
            Self::Object(o) => match &**o {
                Object::Macro { .. } => "Macro",
                Object::Loop(_) => "LoopContext",
                Object::Method(..) => "builtin_function_or_method",
                Object::Function(_) => "function",
                Object::Cycler(..) => "Cycler",
                Object::Joiner(..) => "Joiner",
            },
        }
    }

    /// The error of using this value where it must be defined.
    pub(super) fn undefined_error(&self) -> Option<Fail> {
        let Self::Undefined(why) = self else { return None };
        Some(Fail::failed(match &**why {
            UndefinedReason::Name(name) => format!("'{name}' is undefined"),
            UndefinedReason::Attribute(of, name) => format!("'{of}' has no attribute '{name}'"),
            UndefinedReason::Element(of, key) => format!("{of} has no element {key}"),
            UndefinedReason::Hint(text) => text.clone(),
        }))
    }

    /// Errors: the value is undefined.
    pub(super) fn defined(&self) -> JinjaResult<&Self> {
        self.undefined_error().map_or(Ok(self), Err)
    }

    /// `bool(value)`.
    pub(super) fn truth(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Int(n) => *n != 0,
            Self::Float(x) => *x != 0.0,
            Self::Str(s) | Self::Markup(s) => !s.is_empty(),
            Self::List(s) | Self::Tuple(s) | Self::Group(s) => !s.items.is_empty(),
            Self::Dict(d) | Self::View(_, d) => d.len() > 0,
            Self::Range(r) => r.length > 0,
            Self::Iter(_) | Self::Namespace(_) | Self::Object(_) => true,
        }
    }

    /// `len(value)`. Errors: it has none.
    pub(super) fn length(&self) -> JinjaResult<usize> {
        Ok(match self {
            Self::Undefined(_) => 0,
            Self::Str(s) | Self::Markup(s) => {
                charge(s.len() / 2)?;
                s.chars().count()
            }
            Self::List(s) | Self::Tuple(s) | Self::Group(s) => s.items.len(),
            Self::Dict(d) | Self::View(_, d) => d.len(),
            Self::Range(r) => r.length,
            _ => {
                return Err(Fail::failed(format!(
                    "object of type '{}' has no len()",
                    self.type_name()
                )));
            }
        })
    }

    /// True if the value can be iterated.
    pub(super) fn is_iterable(&self) -> bool {
        match self {
            Self::None | Self::Bool(_) | Self::Int(_) | Self::Float(_) | Self::Namespace(_) => false,
            Self::Object(o) => matches!(**o, Object::Loop(_)),
            _ => true,
        }
    }

    /// All elements; an iterator is empty then. Errors: the value cannot be iterated.
    pub(super) fn elements(&self) -> JinjaResult<Vec<Value>> {
        let items: Vec<Value> = match self {
            Self::Undefined(_) => Vec::new(),
            Self::Str(s) | Self::Markup(s) => {
                charge_items(s.len())?;
                let one = |c: char| Value::str(&*c.encode_utf8(&mut [0; 4]));
                return Ok(s.chars().map(one).collect());
            }
            Self::List(s) | Self::Tuple(s) | Self::Group(s) => s.items.clone(),
            Self::Dict(d) | Self::View(View::Keys, d) => d.iter().map(|(k, _)| k.clone()).collect(),
            Self::View(View::Values, d) => d.iter().map(|(_, v)| v.clone()).collect(),
            Self::View(View::Items, d) => {
                let pair = |(k, v): &(Value, Value)| Value::tuple(vec![k.clone(), v.clone()]);
                d.iter().map(pair).collect::<JinjaResult<_>>()?
            }
            Self::Range(r) => (0..r.length).map(|i| Value::Int(r.get(i))).collect(),
            Self::Iter(i) => {
                let mut out = Vec::new();
                while let Some(item) = i.next()? {
                    out.push(item);
                }
                out
            }
            Self::Object(o) if matches!(**o, Object::Loop(_)) => {
                return Err(Fail::unsupported("`loop` as a list"));
            }
            _ => return Err(Fail::failed(format!("'{}' object is not iterable", self.type_name()))),
        };
        charge_items(items.len())?;
        Ok(items)
    }

    /// As `elements`, for a filter that jinja2 runs only when its result is read.
    pub(super) fn elements_ahead(&self) -> JinjaResult<Vec<Value>> {
        let items = self.elements()?;
        if let Self::Iter(i) = self {
            i.read_ahead.set(true);
        }
        Ok(items)
    }

    /// The elements of a `for` loop of a template. Errors: the value cannot be iterated.
    pub(super) fn source(&self) -> JinjaResult<LoopSource> {
        match self {
            Self::Iter(iter) => Ok(LoopSource::Shared(iter.clone())),
            _ => {
                let items = self.elements()?;
                let length = items.len();
                Ok(LoopSource::Items(items.into(), length))
            }
        }
    }
}
