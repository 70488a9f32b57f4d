/* snapshot_pickle.c — a pickle is a program; this machine knows only the opcodes that build plain
 * data, so no object can be made and nothing can be called. The rest is refused by name before it
 * has any effect. */
#include "allocator/snapshot_reader.h"

/* byte, name, what to do. Everything else is refused. */
enum op {
    OP_PROTO = 0x80,
    OP_FRAME = 0x95,
    OP_STOP = '.',
    OP_MARK = '(',
    OP_NONE = 'N',
    OP_NEWTRUE = 0x88,
    OP_NEWFALSE = 0x89,
    OP_INT = 'I',
    OP_LONG = 'L',
    OP_LONG1 = 0x8a,
    OP_LONG4 = 0x8b,
    OP_BININT = 'J',
    OP_BININT1 = 'K',
    OP_BININT2 = 'M',
    OP_FLOAT = 'F',
    OP_BINFLOAT = 'G',
    OP_UNICODE = 'V',
    OP_SHORT_BINUNICODE = 0x8c,
    OP_BINUNICODE = 'X',
    OP_BINUNICODE8 = 0x8d,
    OP_EMPTY_LIST = ']',
    OP_LIST = 'l',
    OP_APPEND = 'a',
    OP_APPENDS = 'e',
    OP_EMPTY_DICT = '}',
    OP_DICT = 'd',
    OP_SETITEM = 's',
    OP_SETITEMS = 'u',
    OP_EMPTY_TUPLE = ')',
    OP_TUPLE = 't',
    OP_TUPLE1 = 0x85,
    OP_TUPLE2 = 0x86,
    OP_TUPLE3 = 0x87,
    OP_PUT = 'p',
    OP_BINPUT = 'q',
    OP_LONG_BINPUT = 'r',
    OP_MEMOIZE = 0x94,
    OP_GET = 'g',
    OP_BINGET = 'h',
    OP_LONG_BINGET = 'j',
};
static const struct {
    uint8_t op;
    const char *name;
} refused[] = {
    { 'c', "GLOBAL" },
    { 0x93, "STACK_GLOBAL" },
    { 'R', "REDUCE" },
    { 'b', "BUILD" },
    { 'i', "INST" },
    { 'o', "OBJ" },
    { 0x81, "NEWOBJ" },
    { 0x92, "NEWOBJ_EX" },
    { 0x82, "EXT1" },
    { 0x83, "EXT2" },
    { 0x84, "EXT4" },
    { 'P', "PERSID" },
    { 'Q', "BINPERSID" },
    { 0x97, "NEXT_BUFFER" },
    { 0x98, "READONLY_BUFFER" },
    { 'S', "STRING" },
    { 'T', "BINSTRING" },
    { 'U', "SHORT_BINSTRING" },
    { 'B', "BINBYTES" },
    { 'C', "SHORT_BINBYTES" },
    { 0x8e, "BINBYTES8" },
    { 0x96, "BYTEARRAY8" },
    { 0x8f, "EMPTY_SET" },
    { 0x90, "ADDITEMS" },
    { 0x91, "FROZENSET" },
    { '2', "DUP" },
    { '0', "POP" },
    { '1', "POP_MARK" },
};

static inline bool push(reader *r, value v)
{
    /* a dict right below cannot be its parent: it is complete */
    if (kind_of(v) == K_DICT || kind_of(v) == K_LIST) {
        if (r->status)
            return false;
        if (r->n_stack && kind_of(r->stack[r->n_stack - 1]) == K_DICT)
            return BAD(r, "broken pickle: a dict where a key belongs");
    }
    if (r->n_stack == r->stack_cap &&
        !koila__snap_grow64(r, &r->stack, &r->stack_cap, r->n_stack + 1, sizeof v))
        return false;
    koila_assert(r->n_stack < r->stack_cap);
    r->stack[r->n_stack++] = v;
    return true;
}

static bool push_open(reader *r, bool is_dict)
{
    if (r->n_stack && kind_of(r->stack[r->n_stack - 1]) == K_DICT &&
        !finish(r, &r->stack[r->n_stack - 1]))
        return false;
    value v = koila__snap_open_new(r, is_dict);
    return !r->status && push(r, v);
}

static bool pop_to_mark(reader *r, uint64_t *first)
{
    if (!r->n_marks)
        return BAD(r, "broken pickle: no MARK");
    *first = r->marks[--r->n_marks];
    koila_assert(*first <= r->n_stack); /* room_below lets nothing be taken from below a MARK */
    /* finish what is open, innermost first */
    for (uint64_t i = r->n_stack; i-- > *first;)
        if (!finish(r, &r->stack[i]))
            return false;
    return true;
}

static bool underflow(reader *r) { return BAD(r, "broken pickle: stack underflow"); }
static bool room_below(reader *r, uint64_t n)
{
    return r->n_stack >= (r->n_marks ? r->marks[r->n_marks - 1] : 0) + n || underflow(r);
}

static bool memo_put(reader *r, uint64_t slot)
{
    if (!room_below(r, 1))
        return false;
    if (slot > offset(r))
        return BAD(r, "broken pickle: memo slot %llu", (unsigned long long)slot);
    if (slot >= r->memo_cap &&
        !koila__snap_grow64(r, &r->memo, &r->memo_cap, slot + 1, sizeof(value)))
        return false;
    while (r->n_memo <= slot)
        r->memo[r->n_memo++] = make(K_MARK, 0);
    value v = r->stack[r->n_stack - 1];
    open_one *o = koila__snap_open_of(r, v);
    if (o && o->is_closed) {
        v = o->out;
    } else if (o) {
        if (o->memo)
            return BAD(r, "broken pickle: a container is remembered twice");
        o->memo = (uint32_t)slot + 1;
        if (slot >= UINT32_MAX - 1)
            return BAD(r, "broken pickle: memo slot %llu", (unsigned long long)slot);
    }
    /* two containers must not fight for a slot: the older one forgets it */
    if (koila__snap_open_of(r, r->memo[slot]) && r->memo[slot] != v)
        koila__snap_open_of(r, r->memo[slot])->memo = 0;
    koila_assert(slot < r->n_memo);
    r->memo[slot] = v;
    return true;
}

static bool is_unfinished(reader *r)
{
    return BAD(r, "broken pickle: a reference to an unfinished container");
}

/* A reference to a container that may still be filled: torch shares one list of frames between a
 * segment and its blocks. A writer refers to what it has written whole, unless a container holds
 * itself; so it is taken as it is, and filling it later is refused. Each is closed once and holds
 * only what was closed before it: no cycles. */
static bool close_shared(reader *r, uint64_t slot)
{
    const value v = r->memo[slot];
    open_one *o = koila__snap_open_of(r, v);
    if (!o || !r->n_stack)
        return is_unfinished(r);
    value *top = &r->stack[r->n_stack - 1];
    if (*top != v)
        return koila__snap_close(r, o);
    return o->n ? finish(r, top) : is_unfinished(r);
}

static bool memo_get(reader *r, uint64_t slot)
{
    if (slot >= r->n_memo || kind_of(r->memo[slot]) == K_MARK)
        return BAD(r, "broken pickle: memo slot %llu is empty", (unsigned long long)slot);
    const enum kind remembered = kind_of(r->memo[slot]);
    if ((remembered == K_DICT || remembered == K_LIST) && !close_shared(r, slot))
        return false;
    value v = r->memo[slot];
    switch (kind_of(v)) {
    case K_DICT:
    case K_LIST:
        return is_unfinished(r);
    case K_ENTRY:
    case K_ENTRIES:
    case K_SEGMENT:
    case K_SEGMENTS:
    case K_BLOCK:
    case K_BLOCKS:
    case K_TRACES:
    case K_NOTE:
    case K_NOTES:
    case K_TOP:
        return BAD(r, "broken pickle: the same %s reached twice",
                   strchr(koila__snap_kind_names[kind_of(v)], ' ') + 1);
    default:
        return push(r, v);
    }
}

static bool slot_number(reader *r, uint64_t *slot)
{
    const uint8_t *p;
    uint64_t n;
    *slot = 0;
    if (!koila__snap_take_line(r, 20, &p, &n))
        return false;
    if (!n)
        return BAD(r, "broken pickle: memo slot without a number");
    for (uint64_t i = 0; i < n; i++) {
        if (p[i] < '0' || p[i] > '9' || *slot > UINT32_MAX)
            return BAD(r, "broken pickle: memo slot is no number");
        *slot = *slot * 10 + (uint64_t)(p[i] - '0');
    }
    return true;
}

static bool push_int(reader *r, uint64_t bits, bool negative)
{
    value v;
    return koila__snap_make_int(r, bits, negative, &v) && push(r, v);
}

/* Little-endian two's complement of n bytes: at most 9, in [-2^63, 2^64). */
static bool push_long(reader *r, uint64_t n)
{
    if (n > 9)
        return BAD(r, "integer of %llu bytes", (unsigned long long)n);
    if (!koila__snap_have(r, n))
        return koila__snap_early(r, "inside an integer");
    const uint8_t *p = r->buf + r->at;
    uint64_t bits = 0;
    bool negative = n && (p[n - 1] & 0x80);
    for (uint64_t i = 0; i < n && i < 8; i++)
        bits |= (uint64_t)p[i] << 8 * i;
    if (negative && n < 8)
        bits |= ~(uint64_t)0 << 8 * n;
    if (n == 9 && p[8] != (negative ? 0xff : 0))
        return BAD(r, "integer out of range");
    if (n == 9 && negative && !(bits >> 63))
        return BAD(r, "integer out of range");
    r->at += n;
    return push_int(r, bits, negative);
}

static bool push_string(reader *r, uint64_t n)
{
    if (n > r->lim.max_string_bytes)
        return koila__snap_long_string(r, n);
    if (!koila__snap_have(r, n))
        return BAD(r, "ends early: inside a string of %llu bytes, %llu are there",
                   (unsigned long long)n, (unsigned long long)(r->end - r->at));
    uint32_t id;
    if (!koila__snap_intern(r, r->buf + r->at, n, &id))
        return false;
    r->at += n;
    return push(r, make(K_STR, id));
}

/* An escape of \uXXXX or \UXXXXXXXX at p: its bytes, and *c; 0: there is none. */
static unsigned unicode_escape(const uint8_t *p, uint64_t n, uint32_t *c)
{
    if (n < 2 || p[0] != '\\' || (p[1] != 'u' && p[1] != 'U'))
        return 0;
    const unsigned n_digits = p[1] == 'u' ? 4 : 8;
    uint32_t x = 0;
    if (n < 2 + n_digits)
        return 0;
    for (unsigned k = 0; k < n_digits; k++) {
        const int h = koila__snap_hex_digit(p[2 + k]);
        if (h < 0)
            return 0;
        x = x << 4 | (uint32_t)h;
    }
    *c = x;
    return 2 + n_digits;
}

/* UNICODE: a line, Latin-1 with \uXXXX and \UXXXXXXXX */
static bool push_unicode(reader *r)
{
    const uint8_t *p;
    uint64_t n, m = 0;
    if (!koila__snap_take_line(r, r->lim.max_string_bytes, &p, &n))
        return false;
    const koila_allocator mem = koila__snap_counted(r);
    const size_t room = 4 * (size_t)n + 4;
    uint8_t *copy = koila__realloc(&mem, NULL, 0, room);
    if (!copy)
        return false;
    for (uint64_t i = 0; i < n;) {
        uint32_t c = p[i];
        const unsigned len = unicode_escape(p + i, n - i, &c);
        m += koila__snap_put_utf8(copy + m, c);
        i += len ? len : 1;
    }
    uint32_t id;
    bool ok = koila__snap_intern(r, copy, m, &id);
    koila_assert(m <= room); /* four bytes for each of the line */
    koila__release(&mem, copy, room);
    return ok && push(r, make(K_STR, id));
}

static bool push_tuple(reader *r, uint64_t first)
{
    uint64_t n = r->n_stack - first;
    value v = make(n ? K_OTHER : K_EMPTY, 0);
    for (uint64_t i = r->n_stack; i-- > first;)
        if (!finish(r, &r->stack[i]))
            return false;
    if (n == 2 && !koila__snap_pair_of_ints(r, r->stack[first], r->stack[first + 1], &v))
        return false;
    if (n == 1 || n > 2 || kind_of(v) == K_OTHER)
        for (uint64_t i = r->n_stack; i-- > first;)
            koila__snap_drop_unused(r, r->stack[i]);
    r->n_stack = first;
    return push(r, v);
}

static bool fill_dict(reader *r, uint64_t first)
{
    if (!first || (r->n_stack - first) % 2)
        return BAD(r, "broken pickle: a key without a value");
    open_one *o = koila__snap_open_of(r, r->stack[first - 1]);
    if (!o || !o->is_dict)
        return BAD(r, "broken pickle: %s is filled like an open dict",
                   koila__snap_kind_names[kind_of(r->stack[first - 1])]);
    if (o != &r->open[r->n_open - 1])
        return BAD(r, "broken pickle: a dict is filled before another inside it is finished");
    if (o->is_closed)
        return is_unfinished(r);
    for (uint64_t i = first; i < r->n_stack; i += 2)
        if (!dict_add(r, o, r->stack[i], r->stack[i + 1]))
            return false;
    r->n_stack = first;
    return true;
}

static bool fill_list(reader *r, uint64_t first)
{
    if (!first)
        return underflow(r);
    open_one *o = koila__snap_open_of(r, r->stack[first - 1]);
    if (!o || o->is_dict)
        return BAD(r, "broken pickle: %s is filled like an open list",
                   koila__snap_kind_names[kind_of(r->stack[first - 1])]);
    if (o != &r->open[r->n_open - 1])
        return BAD(r, "broken pickle: a list is filled before another inside it is finished");
    if (o->is_closed)
        return is_unfinished(r);
    for (uint64_t i = first; i < r->n_stack; i++)
        if (!koila__snap_list_add(r, o, r->stack[i]))
            return false;
    r->n_stack = first;
    return true;
}

/* DICT and LIST: from MARK, in one. The container is opened late, so its memo slot comes after. */
static bool from_mark(reader *r, bool is_dict)
{
    uint64_t first;
    if (!pop_to_mark(r, &first))
        return false;
    value v = koila__snap_open_new(r, is_dict);
    if (r->status || !push(r, v))
        return false;
    uint64_t n = r->n_stack - 1 - first;
    memmove(r->stack + first + 1, r->stack + first, (size_t)n * sizeof(value));
    r->stack[first] = v;
    return is_dict ? fill_dict(r, first + 1) : fill_list(r, first + 1);
}

/* INT: a line, where 00 and 01 are bools; LONG: one that may end in L. */
static bool push_int_line(reader *r, bool is_long)
{
    const uint8_t *p;
    uint64_t n, bits;
    bool negative;
    if (!koila__snap_take_line(r, 32, &p, &n))
        return false;
    if (!is_long && n == 2 && p[0] == '0' && (p[1] == '0' || p[1] == '1'))
        return push(r, make(K_BOOL, (uint64_t)(p[1] - '0')));
    if (is_long && n && p[n - 1] == 'L')
        n--;
    if (!koila__snap_parse_int(p, n, &bits, &negative))
        return BAD(r, "%s is no integer in range", is_long ? "LONG" : "INT");
    return push_int(r, bits, negative);
}

static bool push_real(reader *r, double x)
{
    value v;
    return koila__snap_make_real(r, x, &v) && push(r, v);
}
static bool push_real_line(reader *r)
{
    const uint8_t *p;
    uint64_t n;
    double x;
    if (!koila__snap_take_line(r, 400, &p, &n))
        return false;
    if (!koila__snap_parse_real(p, n, &x))
        return BAD(r, "FLOAT is no number");
    return push_real(r, x);
}
static bool push_real_bits(reader *r)
{
    uint64_t bits = 0;
    double x;
    if (!take_u(r, 8, &bits))
        return false;
    bits = __builtin_bswap64(bits);
    memcpy(&x, &bits, sizeof x);
    const bool is_number = x <= 1e300 && x >= -1e300; /* neither NaN nor near infinity */
    return push_real(r, is_number ? x : 0);
}

static bool push_mark(reader *r)
{
    if (!koila__snap_grow64(r, &r->marks, &r->marks_cap, r->n_marks + 1, sizeof(uint64_t)))
        return false;
    /* a MARK right on a dict may be SETITEMS' or the start of another element: only what follows
     * tells */
    r->marks[r->n_marks++] = r->n_stack;
    return true;
}

static bool append(reader *r)
{
    return room_below(r, 2) && finish(r, &r->stack[r->n_stack - 1]) && fill_list(r, r->n_stack - 1);
}
static bool set_item(reader *r)
{
    return room_below(r, 3) && finish(r, &r->stack[r->n_stack - 1]) &&
           finish(r, &r->stack[r->n_stack - 2]) && fill_dict(r, r->n_stack - 2);
}

static bool refuse(reader *r, uint8_t op)
{
    r->at--; /* the offset of the opcode itself */
    for (size_t i = 0; i < KOILA_COUNT(refused); i++)
        if (refused[i].op == op)
            return BAD(r,
                       "refused opcode %s: a memory snapshot holds only plain data; this file "
                       "could run code if loaded in Python",
                       refused[i].name);
    return BAD(r, "0x%02x is no pickle opcode", op);
}

/* Whole because each opcode is two lines and the list of them is the machine. */
static bool step(reader *r, uint8_t op)
{
    uint64_t n = 0, first = 0;
    switch (op) {
    case OP_PROTO:
        if (!take_u(r, 1, &n))
            return false;
        return n <= 5 || BAD(r, "pickle protocol %llu is not known", (unsigned long long)n);
    case OP_FRAME:
        return take_u(r, 8, &n);
    case OP_MARK:
        return push_mark(r);
    case OP_NONE:
        return push(r, make(K_NONE, 0));
    case OP_NEWTRUE:
        return push(r, make(K_BOOL, 1));
    case OP_NEWFALSE:
        return push(r, make(K_BOOL, 0));
    case OP_INT:
        return push_int_line(r, false);
    case OP_LONG:
        return push_int_line(r, true);
    case OP_LONG1:
        return take_u(r, 1, &n) && push_long(r, n);
    case OP_LONG4:
        return take_u(r, 4, &n) && push_long(r, n);
    case OP_BININT:
        return take_u(r, 4, &n) && push_int(r, (uint64_t)(int64_t)(int32_t)(uint32_t)n, n >> 31);
    case OP_BININT1:
        return take_u(r, 1, &n) && push(r, make(K_INT, n));
    case OP_BININT2:
        return take_u(r, 2, &n) && push(r, make(K_INT, n));
    case OP_FLOAT:
        return push_real_line(r);
    case OP_BINFLOAT:
        return push_real_bits(r);
    case OP_UNICODE:
        return push_unicode(r);
    case OP_SHORT_BINUNICODE:
        return take_u(r, 1, &n) && push_string(r, n);
    case OP_BINUNICODE:
        return take_u(r, 4, &n) && push_string(r, n);
    case OP_BINUNICODE8:
        return take_u(r, 8, &n) && push_string(r, n);
    case OP_EMPTY_LIST:
        return push_open(r, false);
    case OP_EMPTY_DICT:
        return push_open(r, true);
    case OP_LIST:
        return from_mark(r, false);
    case OP_DICT:
        return from_mark(r, true);
    case OP_APPEND:
        return append(r);
    case OP_APPENDS:
        return pop_to_mark(r, &first) && fill_list(r, first);
    case OP_SETITEM:
        return set_item(r);
    case OP_SETITEMS:
        return pop_to_mark(r, &first) && fill_dict(r, first);
    case OP_EMPTY_TUPLE:
        return push(r, make(K_EMPTY, 0));
    case OP_TUPLE:
        return pop_to_mark(r, &first) && push_tuple(r, first);
    case OP_TUPLE1:
        return room_below(r, 1) && push_tuple(r, r->n_stack - 1);
    case OP_TUPLE2:
        return room_below(r, 2) && push_tuple(r, r->n_stack - 2);
    case OP_TUPLE3:
        return room_below(r, 3) && push_tuple(r, r->n_stack - 3);
    case OP_PUT:
        return slot_number(r, &n) && memo_put(r, n);
    case OP_BINPUT:
        return take_u(r, 1, &n) && memo_put(r, n);
    case OP_LONG_BINPUT:
        return take_u(r, 4, &n) && memo_put(r, n);
    case OP_MEMOIZE:
        return memo_put(r, r->n_memo);
    case OP_GET:
        return slot_number(r, &n) && memo_get(r, n);
    case OP_BINGET:
        return take_u(r, 1, &n) && memo_get(r, n);
    case OP_LONG_BINGET:
        return take_u(r, 4, &n) && memo_get(r, n);
    default:
        return refuse(r, op);
    }
}

bool koila__snap_read_pickle(reader *r)
{
    for (;;) {
        if (r->at == r->end && !koila__snap_have(r, 1))
            return r->status ? false : koila__snap_early(r, "before STOP");
        uint8_t op = r->buf[r->at++];
        if (op == OP_STOP)
            break;
        if (!step(r, op))
            return false;
    }
    if (r->n_stack != 1 || r->n_marks)
        return BAD(r, "broken pickle: %llu values and %llu MARKs at STOP",
                   (unsigned long long)r->n_stack, (unsigned long long)r->n_marks);
    r->top = r->stack[0];
    /* names for the message, should this be no snapshot */
    return true;
}
