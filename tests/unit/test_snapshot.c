/* The reader: what it must read, what it must refuse, and that no byte string whatever harms it. */
#include "fake_recording.h"
#include "koila/koila.h"

static koila_status open_n(const void *p, size_t n, koila_snapshot **out, koila_error *e)
{
    koila_source src = { .struct_size = sizeof src, .data = p, .n_bytes = n };
    *out = NULL;
    return koila_snapshot_open(&src, NULL, out, e);
}

static void refuse(const void *p, size_t n, const char *text)
{
    koila_snapshot *s;
    koila_error e = KOILA_ERROR_INIT;
    koila_status status = open_n(p, n, &s, &e);
    CHECK_EQ(status, KOILA_BAD_INPUT);
    CHECK(!s);
    if (!strstr(e.text, text))
        printf("  got \"%s\", wanted \"%s\"\n", e.text, text);
    CHECK(strstr(e.text, text) != NULL);
    koila_snapshot_free(s);
}
#define REFUSE(bytes, text) refuse(bytes, sizeof(bytes) - 1, text)

TEST(snapshot__messages_name_what_is_wrong)
{
    REFUSE("", "empty file");
    REFUSE("PK\x03\x04....", "found zip");
    REFUSE("\x1f\x8b\x08", "found gzip");
    REFUSE("hello", "found text");
    REFUSE("\x80\x04", "ends early: before STOP");
    REFUSE("\x80\x04X\x2c\x03\x00\x00"
           "abc",
           "ends early: inside a string of 812 bytes, 3 are there");
    REFUSE("\x80\x09.", "pickle protocol 9 is not known");
    REFUSE("\x80\x02\x07.", "0x07 is no pickle opcode");
    REFUSE("\x80\x02}.", "no \"segments\": found keys (none)");
    REFUSE("\x80\x02K\x01.", "not a snapshot: holds an integer");
    REFUSE("\x80\x02u.", "broken pickle: no MARK");
    REFUSE("\x80\x02s.", "broken pickle: stack underflow");
    REFUSE("\x80\x02h\x05.", "broken pickle: memo slot 5 is empty");
    REFUSE("\x80\x02]q\x00h\x00"
           "a.",
           "broken pickle: a reference to an unfinished container");
    REFUSE("\x80\x02\x8a\x28.", "integer of 40 bytes");
    REFUSE("\x80\x02\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x7f.", "integer out of range");
    REFUSE("\x80\x04\x8d\x00\x00\x00\x40\x01\x00\x00\x00.", "string of 5 GiB, limit 16 MiB");
    REFUSE("{\"model\": 1, \"optimizer\": []}", "no \"segments\": found keys model, optimizer");
    REFUSE("\x80\x02}(X\x05\x00\x00\x00modelK\x01X\x09\x00\x00\x00optimizerK\x02u.",
           "no \"segments\": found keys model, optimizer");
    REFUSE("{\"segments\": [] \"x\"}", "JSON: expected ',' or '}'");
    REFUSE("{\"segments\": NaN}", "JSON: expected a value");
    REFUSE("{\"segments\": []} x", "JSON: text after the end");
    REFUSE("{\"segments\": 3}", "\"segments\" is an integer");
    REFUSE("{\"segments\":[],\"device_traces\":[[{\"action\":\"alloc\",\"size\":1}]]}",
           "entry 0: \"addr\" missing");
    REFUSE(
        "{\"segments\":[],\"device_traces\":[[{\"action\":\"alloc\",\"addr\":1,\"size\":\"x\"}]]}",
        "entry 0: \"size\" is a string");
    REFUSE("{\"segments\":[],\"device_traces\":[[{\"action\":\"alloc\",\"addr\":1,\"size\":-1}]]}",
           "entry 0: size -1");
    REFUSE("{\"segments\":[],\"device_traces\":[[{\"action\":\"alloc\",\"addr\":1,\"size\":"
           "9223372036854775808}]]}",
           "entry 0: size 2^63");
    REFUSE("{\"segments\":[],\"device_traces\":[[{\"action\":\"resize\",\"addr\":1,\"size\":1}]]}",
           "entry 0: unknown action \"resize\"");
    REFUSE("{\"segments\":[{\"address\":4096,\"total_size\":2097152,\"blocks\":[{\"size\":2096640,"
           "\"state\":\"inactive\"}]}]}",
           "blocks sum to 2,096,640, segment is 2,097,152");
    REFUSE("{\"segments\":[{\"address\":4096,\"total_size\":512,\"blocks\":[{\"size\":512,"
           "\"state\":\"odd\"}]}]}",
           "unknown state \"odd\"");
    REFUSE(
        "[{\"address\":4096,\"total_size\":512,\"blocks\":[{\"size\":512,\"state\":\"inactive\"}]},"
        "{\"address\":4200,\"total_size\":512,\"blocks\":[{\"size\":512,\"state\":\"inactive\"}]}]",
        "overlaps");
    REFUSE("{\"segments\":[],\"x\":1e}", "JSON: bad number");
    REFUSE("{\"segments\":[],\"x\":01}", "JSON: bad number");
    REFUSE("{\"segments\":[],\"x\":\"\\q\"}", "JSON: bad escape");
    REFUSE("{\"segments\":[],\"x\":18446744073709551616}", "JSON: integer out of range");
}

TEST(snapshot__opcodes_that_could_run_code_are_refused_by_name)
{
    static const struct {
        const char *bytes;
        size_t n;
        const char *name;
    } v[] = {
#define P(s, name) { s, sizeof(s) - 1, name }
        P("\x80\x02"
          "cos\nsystem\nX\x02\x00\x00\x00ls\x85R.",
          "GLOBAL"),
        P("\x80\x04\x8c\x02os\x8c\x06system\x93.", "STACK_GLOBAL"),
        P("\x80\x02]R.", "REDUCE"),
        P("\x80\x02]b.", "BUILD"),
        P("(ios\nsystem\n.", "INST"),
        P("(o.", "OBJ"),
        P("\x80\x02]\x81.", "NEWOBJ"),
        P("\x80\x02\x82\x01.", "EXT1"),
        P("\x80\x02\x83\x01\x01.", "EXT2"),
        P("\x80\x02\x84\x01\x01\x01\x01.", "EXT4"),
        P("\x80\x02]Q.", "BINPERSID"),
        P("\x80\x02Pabc\n.", "PERSID"),
        P("\x80\x05\x97.", "NEXT_BUFFER"),
        P("\x80\x05]\x98.", "READONLY_BUFFER"),
        P("\x80\x04\x8f.", "EMPTY_SET"),
        P("\x80\x04(\x91.", "FROZENSET"),
        P("\x80\x04\x43\x01x.", "SHORT_BINBYTES"),
        P("\x80\x04\x42\x01\x00\x00\x00x.", "BINBYTES"),
        P("\x80\x05\x96\x01\x00\x00\x00\x00\x00\x00\x00x.", "BYTEARRAY8"),
        P("\x80\x02]2.", "DUP"),
        P("\x80\x02]0.", "POP"),
        P("(1.", "POP_MARK"),
        P("(S'abc'\n.", "STRING"),
        P("\x80\x02U\x01x.", "SHORT_BINSTRING"),
        P("\x80\x04]\x92.", "NEWOBJ_EX"),
#undef P
    };
    for (size_t i = 0; i < KOILA_COUNT(v); i++) {
        char text[64];
        snprintf(text, sizeof text, "refused opcode %s:", v[i].name);
        refuse(v[i].bytes, v[i].n, text);
    }
}

TEST(snapshot__nesting_and_memory_have_limits)
{
    static uint8_t deep[400] = { 0x80, 2 };
    memset(deep + 2, ']', 300);
    refuse(deep, 302, "nested deeper than 64");
    static char json[400] = "{\"segments\":";
    memset(json + 12, '[', 300);
    refuse(json, 312, "nested deeper than 64");
    /* a memo slot far away reserves nothing */
    REFUSE("\x80\x02]r\xff\xff\xff\xff.", "memo slot 4294967295");
    /* a length is checked against the bytes that are there */
    REFUSE("\x80\x02X\xff\xff\xff\x00"
           "abc.",
           "are there");
    /* the caller's limit */
    koila_limits lim = { .struct_size = sizeof lim, .max_memory_bytes = 20000 };
    static recording rec;
    koila_cache_config conf;
    koila_cache *c = NULL;
    koila_cache_config_init(&conf, NULL);
    koila_cache_new(&conf, NULL, &c, NULL);
    fake_program(&rec, c, 3, 2000, 0);
    bytes b = write_recording(&rec, 0, true);
    koila_source src = { .struct_size = sizeof src, .data = b.p, .n_bytes = b.n };
    koila_snapshot *s = NULL;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(koila_snapshot_open(&src, &lim, &s, &e), KOILA_BAD_INPUT);
    CHECK(strstr(e.text, "needs more than") != NULL);
    free(b.p);
    koila_cache_free(c);
}

TEST(snapshot__the_same_record_twice_is_refused)
{
    /* an entry from the memo, a second time in the trace */
    REFUSE("\x80\x02}(X\x08\x00\x00\x00segments]X\x0d\x00\x00\x00"
           "device_traces](](}q\x01(X\x06\x00\x00\x00"
           "actionX\x05\x00\x00\x00"
           "allocX\x04\x00\x00\x00"
           "addrK\x01X\x04\x00\x00\x00sizeK\x01uh\x01"
           "eeu.",
           "broken pickle: ");
}

#define SEGMENT_HEAD                                                                               \
    "\x80\x04](}(\x8c\x07"                                                                         \
    "addressM\x00\x10\x8c\x0atotal_sizeM\x00\x04\x8c\x06"                                          \
    "frames"
#define TWO_BLOCKS                                                                                 \
    "\x8c\x06"                                                                                     \
    "blocks](}(\x8c\x04sizeM\x00\x02\x8c\x05state\x8c\x08inactive\x8c\x06"                         \
    "framesh\x07u}(\x8c\x04sizeM\x00\x02\x8c\x05state\x8c\x08inactive\x8c\x06"                     \
    "framesh\x07ue"

/* torch keeps one list of frames for a segment and its blocks; the segment is still under
 * construction where its blocks refer to that list. */
TEST(snapshot__a_list_is_shared_by_what_is_under_construction)
{
    static const char none[] = SEGMENT_HEAD "]q\x07" TWO_BLOCKS "ue.";
    static const char three[] = SEGMENT_HEAD "]q\x07(}q\x08(\x8c\x08"
                                             "filename\x8c\x01"
                                             "fuh\x08h\x08"
                                             "e" TWO_BLOCKS "ue.";
    const struct {
        const char *p;
        size_t n, n_frames;
    } v[] = { { none, sizeof none - 1, 0 }, { three, sizeof three - 1, 3 } };
    for (size_t i = 0; i < KOILA_COUNT(v); i++) {
        koila_snapshot *s;
        koila_error e = KOILA_ERROR_INIT;
        CHECK_EQ(open_n(v[i].p, v[i].n, &s, &e), KOILA_OK);
        if (!s) {
            printf("  %s\n", e.text);
            continue;
        }
        size_t n;
        koila_frame f;
        const koila_segment *g = koila_snapshot_segments(s, 0, &n);
        CHECK_EQ(n, 1);
        CHECK_EQ(g->n_blocks, 2);
        for (size_t b = 0; b < 2; b++) {
            const uint32_t stack = koila_snapshot_block_stack(s, &g->blocks[b]);
            for (uint32_t k = 0; k < v[i].n_frames; k++)
                CHECK(koila_snapshot_frame(s, stack, k, &f) && !strcmp(f.filename, "f"));
            CHECK(!koila_snapshot_frame(s, stack, (uint32_t)v[i].n_frames, &f));
        }
        koila_snapshot_free(s);
    }
    /* what was referred to is complete: nothing can hold itself, at any distance */
    REFUSE("\x80\x02]q\x00(h\x00"
           "e.",
           "a reference to an unfinished container");
    REFUSE("\x80\x02]q\x00(]q\x01(h\x00"
           "ee.",
           "a reference to an unfinished container");
    REFUSE("\x80\x02]}q\x00(X\x01\x00\x00\x00xh\x00"
           "ua.",
           "a reference to an unfinished container");
    REFUSE("\x80\x02}q\x00(X\x01\x00\x00\x00xh\x00"
           "u.",
           "found keys (none)");
    REFUSE("\x80\x02]q\x00(K\x01"
           "eh\x00"
           "a.",
           "is filled like an open list");
}

TEST(snapshot__a_small_file_is_read)
{
    static const char json[] =
        "{\"segments\":[{\"device\":0,\"address\":4096,\"total_size\":2097152,\"stream\":0,"
        "\"segment_type\":\"small\",\"blocks\":["
        "{\"size\":512,\"state\":\"active_allocated\",\"history\":[{\"addr\":4096,\"real_size\":"
        "100,\"frames\":[]}],\"frames\":[{\"name\":\"f\",\"filename\":\"a\\u00e9.py\",\"line\":3}]}"
        ","
        "{\"size\":2096640,\"state\":\"inactive\"}],\"new_key\":{\"a\":[1,2.5,null]}}],"
        "\"device_traces\":[[{\"action\":\"alloc\",\"addr\":4096,\"size\":100,\"stream\":-1,\"time_"
        "us\":5,\"frames\":[]},{\"action\":\"user_defined\"}],[]],"
        "\"external_annotations\":[{\"stage\":\"START\",\"name\":\"step\",\"device\":0,\"time_us\":"
        "3}],"
        "\"allocator_settings\":{\"PYTORCH_CUDA_ALLOC_CONF\":\"max_split_size_mb:64\",\"max_split_"
        "size\":67108864,\"garbage_collection_threshold\":0.5,\"expandable_segments\":false}}";
    koila_snapshot *s;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(open_n(json, sizeof json - 1, &s, &e), KOILA_OK);
    if (!s) {
        printf("  %s\n", e.text);
        return;
    }
    koila_snapshot_info info;
    koila_snapshot_get_info(s, &info);
    CHECK_EQ(info.n_devices, 2);
    CHECK_EQ(info.n_entries, 2);
    CHECK_EQ(info.n_annotations, 1);
    CHECK(info.is_json && info.has_traces && info.n_unknown_keys >= 1);
    size_t n;
    const koila_segment *segs = koila_snapshot_segments(s, 0, &n);
    CHECK_EQ(n, 1);
    CHECK_EQ(segs[0].blocks[0].requested, 100);
    CHECK_EQ(segs[0].blocks[1].addr, 4096 + 512);
    koila_frame f;
    CHECK(koila_snapshot_frame(s, koila_snapshot_block_stack(s, &segs[0].blocks[0]), 0, &f));
    CHECK_STR(f.filename, "a\xc3\xa9.py");
    CHECK(!koila_snapshot_frame(s, koila_snapshot_block_stack(s, &segs[0].blocks[0]), 1, &f));
    koila_entry x = { .struct_size = sizeof x };
    CHECK(koila_snapshot_entry(s, 0, 0, &x));
    CHECK(x.stream == UINT64_MAX && x.struct_size == sizeof x);
    /* a caller whose header ends there */
    koila_entry old = { .struct_size = offsetof(koila_entry, stream), .stream = 77 };
    CHECK(koila_snapshot_entry(s, 0, 0, &old));
    CHECK(old.size == x.size && old.stream == 77 &&
          old.struct_size == offsetof(koila_entry, stream));
    CHECK(!koila_snapshot_entry(s, 0, 2, &x));
    CHECK(!koila_snapshot_entry(s, 1, 0, &x));
    koila_cache_config conf;
    CHECK_EQ(koila_snapshot_config(s, 0, NULL, &conf, &e), KOILA_OK);
    CHECK_EQ(conf.max_split_bytes, 64 << 20);
    CHECK(conf.gc_threshold == 0.5);
    koila_annotation a;
    CHECK(koila_snapshot_annotation(s, 0, &a) && !strcmp(a.name, "step"));
    koila_snapshot_free(s);
}

static recording rec2;
static bytes small_recording(bool pickle)
{
    koila_cache_config conf;
    koila_cache *c = NULL;
    koila_cache_config_init(&conf, NULL);
    koila_cache_new(&conf, NULL, &c, NULL);
    memset(&rec2, 0, sizeof rec2);
    fake_program(&rec2, c, 2, 7, 20);
    koila_cache_free(c);
    return write_recording(&rec2, 0, pickle);
}

TEST(snapshot__pickle_and_json_say_the_same)
{
    bytes a = small_recording(true);
    bytes b = small_recording(false);
    koila_snapshot *s, *t;
    CHECK_EQ(open_n(a.p, a.n, &s, NULL), KOILA_OK);
    CHECK_EQ(open_n(b.p, b.n, &t, NULL), KOILA_OK);
    koila_entry x = { .struct_size = sizeof x };
    koila_entry y = { .struct_size = sizeof y };
    CHECK_EQ(koila_snapshot_n_entries(s, 0), rec2.n);
    for (uint64_t i = 0; koila_snapshot_entry(s, 0, i, &x); i++) {
        CHECK(koila_snapshot_entry(t, 0, i, &y));
        CHECK(x.kind == y.kind && x.addr == y.addr && x.size == y.size && x.stream == y.stream &&
              x.time_us == y.time_us && x.stack == y.stack);
        CHECK(x.kind == rec2.e[i].kind && x.addr == rec2.e[i].addr && x.size == rec2.e[i].size);
    }
    koila_snapshot_free(s);
    koila_snapshot_free(t);
    free(a.p);
    free(b.p);
}

/* Read in pieces of 1, 2, 3, ... bytes: the same as from memory. */
typedef struct dribble {
    const bytes *b;
    size_t at, piece;
} dribble;
static int64_t read_some(void *user, void *p, size_t n)
{
    dribble *d = user;
    size_t k = d->piece++ % 7 + 1;
    if (k > n)
        k = n;
    if (k > d->b->n - d->at)
        k = d->b->n - d->at;
    memcpy(p, d->b->p + d->at, k);
    d->at += k;
    return (int64_t)k;
}

TEST(snapshot__a_stream_is_read_like_memory)
{
    for (int pickle = 0; pickle < 2; pickle++) {
        bytes b = small_recording(pickle);
        dribble d = { &b, 0, 0 };
        koila_source src = { .struct_size = sizeof src, .read = read_some, .user = &d };
        koila_snapshot *s = NULL;
        koila_error e = KOILA_ERROR_INIT;
        CHECK_EQ(koila_snapshot_open(&src, NULL, &s, &e), KOILA_OK);
        if (!s)
            printf("  %s\n", e.text);
        else
            CHECK_EQ(koila_snapshot_n_entries(s, 0), rec2.n);
        koila_snapshot_free(s);
        free(b.p);
    }
}

static void try_bytes(const uint8_t *p, size_t n)
{
    koila_snapshot *s;
    koila_error e = KOILA_ERROR_INIT;
    koila_replay_result out;
    uint8_t *copy = malloc(n ? n : 1); /* exactly n, so that a byte too far is seen */
    memcpy(copy, p, n);
    koila_status status = open_n(copy, n, &s, &e);
    free(copy);
    CHECK(status == KOILA_OK || (status == KOILA_BAD_INPUT && e.text[0] && !s));
    if (status)
        return;
    koila_status replayed = koila_replay(s, 0, NULL, &out, &e);
    CHECK(replayed == KOILA_OK || replayed == KOILA_BAD_INPUT || replayed == KOILA_UNSUPPORTED ||
          replayed == KOILA_BAD_ARGUMENT);
    koila_snapshot_free(s);
}

TEST(snapshot__no_prefix_and_no_changed_byte_does_harm)
{
    for (int pickle = 0; pickle < 2; pickle++) {
        bytes b = small_recording(pickle);
        for (size_t n = 0; n < b.n; n++)
            try_bytes(b.p, n);
        for (size_t i = 0; i < b.n; i++) {
            const uint8_t old = b.p[i];
            static const uint8_t changes[] = { 0,   1,   '(', '.', '}',  ']',  'e', 'u',
                                               'a', 's', 'h', 'q', 0x80, 0xff, '"', '\\',
                                               '0', '9', '-', ',', '[',  '{' };
            for (size_t k = 0; k < KOILA_COUNT(changes); k++) {
                b.p[i] = changes[k];
                try_bytes(b.p, b.n);
            }
            for (int bit = 0; bit < 8; bit++) {
                b.p[i] = (uint8_t)(old ^ 1 << bit);
                try_bytes(b.p, b.n);
            }
            b.p[i] = old;
        }
        free(b.p);
    }
}

TEST(snapshot__the_version_of_torch_is_told_by_the_keys_that_it_writes)
{
    static const struct {
        const char *pool, *settings, *top;
        uint32_t version;
    } v[] = {
        { "", "\"expandable_segments\":false", "", 206 },
        { "", "\"graph_capture_record_stream_reuse\":false", "", 211 },
        { ",\"pool_id\":[0,0]", "\"graph_capture_record_stream_reuse\":false", "", 212 },
        { ",\"pool_id\":[0,0]",
          "\"graph_capture_record_stream_reuse\":false,\"max_cached_size\":-1", "", 213 },
        { ",\"pool_id\":[0,0]", "\"expandable_segments\":false", "", 213 },
        { ",\"pool_id\":[0,0]",
          "\"graph_capture_record_stream_reuse\":false,\"max_cached_size\":-1",
          ",\"host_traces\":[]", 214 },
    };
    for (size_t i = 0; i < KOILA_COUNT(v); i++) {
        char text[600];
        koila_snapshot *s;
        koila_cache_config c;
        koila_error e = KOILA_ERROR_INIT;
        const int n = snprintf(
            text, sizeof text,
            "{\"segments\":[],\"device_traces\":[[{\"action\":\"oom\",\"device_free\":1,\"size\":1,"
            "\"stream\":0%s}]],\"allocator_settings\":{\"PYTORCH_CUDA_ALLOC_CONF\":\"\",%s}%s}",
            v[i].pool, v[i].settings, v[i].top);
        CHECK_EQ(open_n(text, (size_t)n, &s, &e), KOILA_OK);
        CHECK_EQ(koila_snapshot_config(s, 0, NULL, &c, &e), KOILA_OK);
        CHECK_EQ(c.torch_version, v[i].version);
        koila_snapshot_free(s);
    }
}

TEST(snapshot__what_is_passed_over_is_counted)
{
    static const char text[] =
        "{\"segments\":[],\"device_traces\":[[{\"action\":\"user_defined\",\"odd\":1},{\"action\":"
        "\"alloc\",\"addr\":1,\"size\":1,\"stream\":0,\"new\":[1]}]],"
        "\"allocator_settings\":{\"PYTORCH_CUDA_ALLOC_CONF\":\"\",\"throw_on_cudamalloc_oom\":true,"
        "\"roundup_power2_divisions\":{\"1\":0,\"2\":0}},\"more\":{\"a\":1}}";
    koila_snapshot *s;
    koila_snapshot_info info;
    koila_cache_config c;
    koila_error e = KOILA_ERROR_INIT;
    CHECK_EQ(open_n(text, sizeof text - 1, &s, &e), KOILA_OK);
    koila_snapshot_get_info(s, &info);
    CHECK_EQ(info.n_entries, 2);
    CHECK_EQ(info.n_skipped_entries, 1);
    CHECK_EQ(info.n_unknown_keys, 4); /* odd, new, more, a: not the sizes of divisions */
    CHECK_EQ(koila_snapshot_config(s, 0, "2.13", &c, &e), KOILA_OK);
    CHECK_EQ(c.oom_reject, 1);
    koila_snapshot_free(s);
}
