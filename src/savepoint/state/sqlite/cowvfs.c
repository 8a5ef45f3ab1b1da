/*
** cowvfs.c -- a copy-on-write VFS for SQLite: one immutable base file, one small page delta per session.
**
** The idea. A base database is mapped read-only (PROT_READ), once, however many sessions read it. What a
** session writes goes to pages of its own, found through a tree of reference-counted nodes with 64 slots each:
**
**      Volume (a session's file)            Image (immutable: a snapshot, a derived image, or the bare base)
**        Tree  size, limit, root --+          Tree  size, limit, root --+
**                                  |                                    |
**                                  +----> Node (64 slots) <-------------+   shared by both, reference counted
**                                           slot -> Node -> ... -> leaf; NULL: the base shows through
**                                                           leaf's slot -> Page; NULL: the base shows
**
** A snapshot is one more reference to the root: its cost depends neither on the base nor on the delta. Whoever
** writes below something shared copies the path from the root first, which is one node for each level
** (three for a gigabyte). Two trees are compared by identity, subtree by subtree: what they share is skipped.
**
** Rules that make it safe to give to an agent:
**   - Each volume registers a VFS of its own, which opens its own volume once and nothing else. No SQL, however
**     it spells a file name, can name another session or a file on the disk.
**   - A write that changes nothing costs nothing; a page that becomes equal to the base (or to the image the
**     session began with) is given back. So a rollback frees what the transaction took.
**   - Quotas are per volume: pages (also those that only its snapshots keep) and temporary bytes (journals,
**     TEMP tables, sorters). While a journal is being read back, that is during a rollback, the page quota does
**     not apply: a rollback must never fail for want of room.
**   - Every allocation is checked; failure leaves what the tree shows as it was.
**   - All pages and temporary files of the process stay within one budget of memory; pages beyond it live in a
**     spill file, if one was given, and are refused otherwise.
**   - Locks: one for each volume. The library's list of VFSs, which has a global lock, holds a volume only while
**     a connection is open on it. The library walks that list from its head, to find a VFS and to register one;
**     ours stand behind a gate near the head, newest first, so that opening costs the same with ten thousand open.
**
** Built against sqlite3ext.h alone and loaded through the SQLite library that will use it (apsw's), because a
** VFS belongs to one copy of the library. Control goes through the cow_* functions (ctypes); a handle is a
** pointer that only the caller knows. Errors are negative errno values.
*/
#include "sqlite3ext.h"
SQLITE_EXTENSION_INIT1
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef sqlite3_int64 i64;
typedef unsigned char u8;

#ifndef COW_SOURCE
#define COW_SOURCE "unknown"
#endif
#define EXPORT __attribute__((visibility("default")))
#define BITS 5                  /* a node has 1 << BITS slots; measured: 16 slots save nothing more */
#define FAN (1 << BITS)
#define MEMORY_START 8192       /* first allocation of a journal or a temporary file */
#define JOURNAL_KEEP 8192       /* a truncated journal keeps a buffer up to this size for the next transaction */
#define MAX_PAGE 65536          /* SQLite's largest page */
#define LIST_MUTEX 2            /* SQLITE_MUTEX_STATIC_MAIN, of the list of VFSs; older headers have another name for it */
#define SEGMENT (4 << 20)       /* the spill file grows by so much; a multiple of every page size */

/* ------------------------------------------------------------------ pages, nodes, trees */

/* Who pays for a page: the volume that made it. Outlives the volume while one of its pages is alive. */
typedef struct Account { atomic_int ref; atomic_llong pages; } Account;
typedef struct Page { atomic_int ref; int spilled; int size; Account *payer; u8 *data; } Page;
/* An inner node's slots hold nodes, a leaf's pages: the level says which, and whoever descends knows it. */
typedef struct Node { atomic_int ref; void *slot[FAN]; } Node;
typedef struct Base { atomic_int ref; const u8 *map; i64 size; int page_size; } Base;

/* size: bytes of the file. limit: bytes of the base that still show (a truncated file never shows them again).
** height: levels of inner nodes above the leaves, so that 64^(height + 1) pages have a place. */
typedef struct Tree { Base *base; i64 size, limit; Node *root; int height; } Tree;
/* differs: pages that its volume's origin shows otherwise (`origin` is only compared, never looked into). */
typedef struct Image { atomic_int ref; Tree tree; const struct Image *origin; i64 differs; } Image;

typedef struct Volume {
  sqlite3_vfs vfs;              /* this volume's own VFS; pAppData points back here */
  char name[48];
  pthread_mutex_t mutex;
  Tree tree;
  Image *origin;                /* what the lease began with; reset goes back to it */
  Account *account;
  i64 max_pages, max_temp;
  i64 differs;                  /* pages that the origin shows otherwise, kept as they are written */
  atomic_llong writes;          /* changes so far: equal numbers mean equal contents */
  i64 clock_ms;                 /* what 'now' is, in milliseconds of the Julian day; 0: the host's clock */
  sqlite3_vfs **place;          /* what points to this VFS in the library's list; NULL: the library does not know it */
  atomic_llong temp;            /* bytes of journals and temporary files now held */
  atomic_int open_files;
  int main_open;
  int replaying;                /* a journal is being read back: a rollback is under way */
  int refused;                  /* since cow_begin: 1 page quota, 2 temp quota, 4 the host's disk is full */
} Volume;

static sqlite3_vfs *host;       /* the library's default VFS: clock, randomness, real temporary files */
static atomic_llong live_pages, live_volumes, live_images, live_bases, live_nodes;

static void account_unref(Account *a) { if (atomic_fetch_sub(&a->ref, 1) == 1) free(a); }

/* ---- the budget of the process, and the spill file: pages by size in segments that are mapped once and never moved */

static atomic_llong memory_used;
static i64 memory_budget = 0;   /* bytes of pages and temporary files in memory; 0: no bound */
static pthread_mutex_t spill_mutex = PTHREAD_MUTEX_INITIALIZER;
static int spill_fd = -1;
static i64 spill_size, spill_max;
static void *spill_free[8];     /* by page size, 512 << i: a list through the free pages themselves */

/* The last quarter is for journals and temporary files, which cannot be spilled: without them no statement could write. */
static int memory_take(i64 bytes, int page) {
  i64 used = atomic_fetch_add(&memory_used, bytes) + bytes;
  if (!memory_budget || used <= (page ? memory_budget / 4 * 3 : memory_budget)) return 1;
  atomic_fetch_sub(&memory_used, bytes);
  return 0;
}

static void memory_give(i64 bytes) { atomic_fetch_sub(&memory_used, bytes); }

static int size_class(int page_size) { int i = 0; while (512 << i < page_size) i++; return i; }

static u8 *spill_take(int page_size) {
  int class = size_class(page_size);
  pthread_mutex_lock(&spill_mutex);
  if (!spill_free[class] && spill_fd >= 0 && spill_size + SEGMENT <= spill_max && ftruncate(spill_fd, spill_size + SEGMENT) == 0) {
    u8 *segment = mmap(NULL, SEGMENT, PROT_READ | PROT_WRITE, MAP_SHARED, spill_fd, spill_size);
    if (segment != MAP_FAILED) {
      spill_size += SEGMENT;
      for (i64 at = 0; at < SEGMENT; at += page_size) { *(void **)(segment + at) = spill_free[class]; spill_free[class] = segment + at; }
    }
  }
  void *page = spill_free[class];
  if (page) spill_free[class] = *(void **)page;
  pthread_mutex_unlock(&spill_mutex);
  return page;
}

static void spill_give(u8 *data, int page_size) {
  int class = size_class(page_size);
  pthread_mutex_lock(&spill_mutex);
  *(void **)data = spill_free[class];
  spill_free[class] = data;
  pthread_mutex_unlock(&spill_mutex);
}

static void page_unref(Page *p) {
  if (!p || atomic_fetch_sub(&p->ref, 1) != 1) return;
  atomic_fetch_sub(&p->payer->pages, 1);
  account_unref(p->payer);
  if (p->spilled) spill_give(p->data, p->size);
  else memory_give(p->size);
  free(p);
  atomic_fetch_sub(&live_pages, 1);
}

/* NULL: no memory. *host_full: neither memory nor spill file has room. must: a rollback needs it, over the budget if need be.
** A page in memory is one allocation with its head. */
static Page *page_new(Account *payer, int page_size, int must, int *host_full) {
  int spilled = !memory_take(page_size, 1);
  u8 *data = spilled ? spill_take(page_size) : NULL;
  if (spilled && !data) {
    if (!must) { *host_full = 1; return NULL; }
    atomic_fetch_add(&memory_used, page_size);
    spilled = 0;
  }
  Page *p = malloc(sizeof(Page) + (spilled ? 0 : (size_t)page_size));
  if (!p) {
    if (spilled) spill_give(data, page_size);
    else memory_give(page_size);
    return NULL;
  }
  atomic_init(&p->ref, 1);
  p->spilled = spilled;
  p->size = page_size;
  p->data = spilled ? data : (u8 *)(p + 1);
  p->payer = payer;
  atomic_fetch_add(&payer->ref, 1);
  atomic_fetch_add(&payer->pages, 1);
  atomic_fetch_add(&live_pages, 1);
  return p;
}

/* level 0: a leaf */
static void node_unref(Node *n, int level) {
  if (!n || atomic_fetch_sub(&n->ref, 1) != 1) return;
  for (int i = 0; i < FAN; i++) {
    if (level) node_unref(n->slot[i], level - 1);
    else page_unref(n->slot[i]);
  }
  free(n);
  atomic_fetch_sub(&live_nodes, 1);
}

/* *place made private: as it is, a copy that shares what is below, or a new empty one. NULL: out of memory, nothing changed. */
static Node *node_own(void **place, int level) {
  Node *old = *place;
  if (old && atomic_load(&old->ref) == 1) return old;
  Node *own = calloc(1, sizeof *own);
  if (!own) return NULL;
  atomic_init(&own->ref, 1);
  atomic_fetch_add(&live_nodes, 1);
  if (old) {
    for (int i = 0; i < FAN; i++) {
      if (!(own->slot[i] = old->slot[i])) continue;
      if (level) atomic_fetch_add(&((Node *)own->slot[i])->ref, 1);
      else atomic_fetch_add(&((Page *)own->slot[i])->ref, 1);
    }
    node_unref(old, level);
  }
  *place = own;
  return own;
}

static void base_unref(Base *b) {
  if (atomic_fetch_sub(&b->ref, 1) != 1) return;
  munmap((void *)b->map, (size_t)b->size);
  free(b);
  atomic_fetch_sub(&live_bases, 1);
}

/* The slot of page pg in a node at this level. */
static int slot_of(i64 pg, int level) { return (int)(pg >> (BITS * level)) & (FAN - 1); }
static i64 tree_room(const Tree *t) { return (i64)1 << (BITS * (t->height + 1)); }

static Node *tree_leaf(const Tree *t, i64 pg) {
  if (pg >= tree_room(t)) return NULL;
  Node *n = t->root;
  for (int level = t->height; n && level > 0; level--) n = n->slot[slot_of(pg, level)];
  return n;
}

static Page *tree_get(const Tree *t, i64 pg) {
  const Node *leaf = tree_leaf(t, pg);
  return leaf ? leaf->slot[slot_of(pg, 0)] : NULL;
}

static void tree_clear(Tree *t) {
  node_unref(t->root, t->height);
  t->root = NULL;
  t->height = 0;
}

/* dst becomes another reference to everything in src. dst must hold nothing. */
static void tree_share(Tree *dst, const Tree *src) {
  if (src->root) atomic_fetch_add(&src->root->ref, 1);
  *dst = *src;
}

/* The leaf of page pg, with the path to it made private to this tree. NULL: out of memory, nothing shown has changed. */
static Node *tree_own_leaf(Tree *t, i64 pg) {
  while (pg >= tree_room(t)) {  /* a level more, above what is there */
    if (t->root) {
      Node *top = calloc(1, sizeof *top);
      if (!top) return NULL;
      atomic_init(&top->ref, 1);
      atomic_fetch_add(&live_nodes, 1);
      top->slot[0] = t->root;
      t->root = top;
    }
    t->height++;
  }
  void **place = (void **)&t->root;
  for (int level = t->height; level > 0; level--) {
    Node *n = node_own(place, level);
    if (!n) return NULL;
    place = &n->slot[slot_of(pg, level)];
  }
  return node_own(place, 0);
}

/* Drop every page from number `first` on, counted from the node's first page. 0: out of memory, a part is dropped already. */
static int node_cut(void **place, int level, i64 first) {
  if (!*place) return 1;
  if (first <= 0) {
    node_unref(*place, level);
    *place = NULL;
    return 1;
  }
  i64 span = (i64)1 << (BITS * level);  /* pages below one slot */
  if (first >= span * FAN) return 1;
  Node *n = node_own(place, level);
  if (!n) return 0;
  for (int i = (int)(first / span); i < FAN; i++) {
    if (level) { if (!node_cut(&n->slot[i], level - 1, first - i * span)) return 0; }
    else { page_unref(n->slot[i]); n->slot[i] = NULL; }
  }
  return 1;
}

/* Pages that one shows otherwise than the other, by identity: shared subtrees and pages are equal without a look. */
static i64 node_differences(const Node *a, const Node *b, int level) {
  i64 count = 0;
  if (a == b) return 0;
  for (int i = 0; i < FAN; i++) {
    const void *x = a ? a->slot[i] : NULL, *y = b ? b->slot[i] : NULL;
    count += level ? node_differences(x, y, level - 1) : x != y;
  }
  return count;
}

static i64 tree_differences(const Tree *a, const Tree *b) {
  if (a->height < b->height) { const Tree *c = a; a = b; b = c; }
  const Node *n = a->root;
  i64 count = 0;
  for (int level = a->height; level > b->height; level--) {  /* above b's root: all but the first slot has nothing to compare with */
    for (int i = 1; n && i < FAN; i++) count += node_differences(n->slot[i], NULL, level - 1);
    n = n ? n->slot[0] : NULL;
  }
  return count + node_differences(n, b->root, b->height);
}

/* Bytes of page pg that the base still shows. */
static i64 base_span(const Tree *t, i64 pg) {
  i64 left = t->limit - pg * t->base->page_size;
  return left <= 0 ? 0 : left < t->base->page_size ? left : t->base->page_size;
}

static int all_zero(const u8 *p, i64 n) { return n <= 0 || (p[0] == 0 && memcmp(p, p + 1, (size_t)(n - 1)) == 0); }

static int equals_base(const Tree *t, i64 pg, const u8 *data) {
  int ps = t->base->page_size;
  i64 span = base_span(t, pg);
  return (span == 0 || memcmp(t->base->map + pg * ps, data, (size_t)span) == 0) && all_zero(data + span, ps - span);
}

static void tree_read_page(const Tree *t, i64 pg, int from, int n, u8 *out) {
  const Page *p = tree_get(t, pg);
  if (p) { memcpy(out, p->data + from, (size_t)n); return; }
  i64 span = base_span(t, pg) - from;
  if (span > n) span = n;
  if (span < 0) span = 0;
  if (span) memcpy(out, t->base->map + pg * t->base->page_size + from, (size_t)span);
  memset(out + span, 0, (size_t)(n - span));
}

/* What slot i of a leaf shows from now on; takes over the reference. Keeps count of what differs from the origin. */
static void leaf_set(Volume *v, Node *leaf, int i, Page *page, const Page *began) {
  Page *old = leaf->slot[i];
  v->differs += (page != began) - (old != began);
  atomic_fetch_add(&v->writes, 1);
  leaf->slot[i] = page;
  page_unref(old);
}

/* Write one whole page. The order of the questions is the policy: unchanged, back to the image, back to the base, own. */
static int volume_write_page(Volume *v, i64 pg, const u8 *data) {
  Tree *t = &v->tree;
  int ps = t->base->page_size;
  Page *current = tree_get(t, pg);
  if (current ? memcmp(current->data, data, (size_t)ps) == 0 : equals_base(t, pg, data)) return SQLITE_OK;
  Page *began = tree_get(&v->origin->tree, pg);
  int back_to_image = began && began != current && memcmp(began->data, data, (size_t)ps) == 0;
  int back_to_base = current && !back_to_image && equals_base(t, pg, data);
  Node *leaf = tree_own_leaf(t, pg);
  if (!leaf) return SQLITE_IOERR_NOMEM;
  int i = slot_of(pg, 0);
  current = leaf->slot[i];
  if (back_to_image || back_to_base) {
    if (back_to_image) atomic_fetch_add(&began->ref, 1);
    leaf_set(v, leaf, i, back_to_image ? began : NULL, began);
    return SQLITE_OK;
  }
  if (!current || atomic_load(&current->ref) > 1) {
    if (!v->replaying && atomic_load(&v->account->pages) >= v->max_pages) { v->refused |= 1; return SQLITE_FULL; }
    int host_full = 0;
    Page *own = page_new(v->account, ps, v->replaying, &host_full);
    if (host_full) { v->refused |= 4; return SQLITE_FULL; }
    if (!own) return SQLITE_IOERR_NOMEM;
    leaf_set(v, leaf, i, current = own, began);
  }
  memcpy(current->data, data, (size_t)ps);
  atomic_fetch_add(&v->writes, 1);
  return SQLITE_OK;
}

/* ------------------------------------------------------------------ the main database file */

typedef struct MainFile { sqlite3_file base; Volume *v; } MainFile;

static int main_close(sqlite3_file *f) {
  Volume *v = ((MainFile *)f)->v;
  pthread_mutex_lock(&v->mutex);
  v->main_open = 0;
  pthread_mutex_unlock(&v->mutex);
  atomic_fetch_sub(&v->open_files, 1);
  return SQLITE_OK;
}

static int main_read(sqlite3_file *f, void *buf, int n, i64 off) {
  Volume *v = ((MainFile *)f)->v;
  u8 *out = buf;
  int rc = SQLITE_OK;
  pthread_mutex_lock(&v->mutex);
  int ps = v->tree.base->page_size;
  if (off + n > v->tree.size) {
    i64 got = v->tree.size > off ? v->tree.size - off : 0;
    memset(out + got, 0, (size_t)(n - got));
    n = (int)got;
    rc = SQLITE_IOERR_SHORT_READ;
  }
  while (n > 0) {
    int from = (int)(off % ps), k = ps - from < n ? ps - from : n;
    tree_read_page(&v->tree, off / ps, from, k, out);
    out += k; off += k; n -= k;
  }
  pthread_mutex_unlock(&v->mutex);
  return rc;
}

static int main_write(sqlite3_file *f, const void *buf, int n, i64 off) {
  Volume *v = ((MainFile *)f)->v;
  const u8 *in = buf;
  int rc = SQLITE_OK;
  pthread_mutex_lock(&v->mutex);
  int ps = v->tree.base->page_size;
  while (n > 0 && rc == SQLITE_OK) {
    int from = (int)(off % ps), k = ps - from < n ? ps - from : n;
    if (k == ps) rc = volume_write_page(v, off / ps, in);
    else {                      /* SQLite writes whole pages; a part is merged into what is there */
      u8 *whole = malloc((size_t)ps);
      if (!whole) { rc = SQLITE_IOERR_NOMEM; break; }
      tree_read_page(&v->tree, off / ps, 0, ps, whole);
      memcpy(whole + from, in, (size_t)k);
      rc = volume_write_page(v, off / ps, whole);
      free(whole);
    }
    in += k; off += k; n -= k;
    if (rc == SQLITE_OK && off > v->tree.size) v->tree.size = off;
  }
  pthread_mutex_unlock(&v->mutex);
  return rc;
}

/* Only slots are dropped, no page is rewritten: sizes are whole pages whenever SQLite truncates a database. */
static int volume_truncate(Volume *v, i64 size) {
  Tree *t = &v->tree;
  int ps = t->base->page_size, whole = 1;
  i64 first = (size + ps - 1) / ps;
  if (size == t->size) return SQLITE_OK;
  if (size < t->size) {
    whole = node_cut((void **)&t->root, t->height, first);
    v->differs = tree_differences(t, &v->origin->tree);
    atomic_fetch_add(&v->writes, 1);
  }
  if (!whole) return SQLITE_IOERR_NOMEM;
  if (size < t->limit) t->limit = size;
  t->size = size;
  return SQLITE_OK;
}

static int main_truncate(sqlite3_file *f, i64 size) {
  Volume *v = ((MainFile *)f)->v;
  int rc = SQLITE_OK;
  pthread_mutex_lock(&v->mutex);
  rc = size % v->tree.base->page_size ? SQLITE_IOERR_TRUNCATE : volume_truncate(v, size);
  pthread_mutex_unlock(&v->mutex);
  return rc;
}

static int main_size(sqlite3_file *f, i64 *size) {
  Volume *v = ((MainFile *)f)->v;
  pthread_mutex_lock(&v->mutex);
  *size = v->tree.size;
  pthread_mutex_unlock(&v->mutex);
  return SQLITE_OK;
}

static int main_control(sqlite3_file *f, int op, void *arg) {
  if (op != SQLITE_FCNTL_VFSNAME) return SQLITE_NOTFOUND;
  *(char **)arg = sqlite3_mprintf("%s", ((MainFile *)f)->v->name);
  return SQLITE_OK;
}

static int nothing_sync(sqlite3_file *f, int flags) { (void)f; (void)flags; return SQLITE_OK; }
static int nothing_lock(sqlite3_file *f, int level) { (void)f; (void)level; return SQLITE_OK; }  /* one connection per file */
static int nothing_reserved(sqlite3_file *f, int *out) { (void)f; *out = 0; return SQLITE_OK; }
static int nothing_control(sqlite3_file *f, int op, void *arg) { (void)f; (void)op; (void)arg; return SQLITE_NOTFOUND; }
static int sector_size(sqlite3_file *f) { (void)f; return 512; }      /* the smallest journal header */
static int device(sqlite3_file *f) { (void)f; return SQLITE_IOCAP_ATOMIC | SQLITE_IOCAP_POWERSAFE_OVERWRITE | SQLITE_IOCAP_SAFE_APPEND | SQLITE_IOCAP_SEQUENTIAL; }

static const sqlite3_io_methods main_io = {1, main_close, main_read, main_write, main_truncate, nothing_sync, main_size,
  nothing_lock, nothing_lock, nothing_reserved, main_control, sector_size, device, 0, 0, 0, 0, 0, 0};

/* ------------------------------------------------------------------ journals, TEMP tables, sorters: in memory, on the session's account */

typedef struct Memory { sqlite3_file base; Volume *v; u8 *data; i64 size, room; int journal; } Memory;

/* Room for `room` bytes. The buffer moves by realloc, which for large ones moves page tables and no bytes. */
static int memory_resize(Memory *m, i64 room) {
  Volume *v = m->v;
  i64 grow = room - m->room;
  if (grow > 0) {
    if (atomic_load(&v->temp) + grow > v->max_temp) { v->refused |= 2; return SQLITE_FULL; }
    if (!memory_take(grow, 0)) { v->refused |= 4; return SQLITE_FULL; }
  }
  u8 *data = room ? realloc(m->data, (size_t)room) : NULL;
  if (room && !data) {
    if (grow > 0) memory_give(grow);
    return SQLITE_IOERR_NOMEM;
  }
  if (!room) free(m->data);
  if (grow < 0) memory_give(-grow);
  atomic_fetch_add(&v->temp, grow);
  m->data = data;
  m->room = room;
  return SQLITE_OK;
}

static int memory_close(sqlite3_file *f) {
  Memory *m = (Memory *)f;
  if (m->journal) m->v->replaying = 0;
  memory_resize(m, 0);
  atomic_fetch_sub(&m->v->open_files, 1);
  return SQLITE_OK;
}

static int memory_read(sqlite3_file *f, void *buf, int n, i64 off) {
  Memory *m = (Memory *)f;
  i64 got = m->size - off < n ? m->size - off : n;
  if (got < 0) got = 0;
  if (m->journal) m->v->replaying = 1;   /* SQLite reads a journal for no other reason */
  if (got) memcpy(buf, m->data + off, (size_t)got);
  if (got == n) return SQLITE_OK;
  memset((u8 *)buf + got, 0, (size_t)(n - got));
  return SQLITE_IOERR_SHORT_READ;
}

static int memory_write(sqlite3_file *f, const void *buf, int n, i64 off) {
  Memory *m = (Memory *)f;
  i64 end = off + n;
  if (m->journal) m->v->replaying = 0;
  if (end > m->room) {
    i64 room = m->room ? m->room : MEMORY_START;
    while (room < end) room += room < (1 << 20) ? room : room / 4;
    if (room > m->v->max_temp && end <= m->v->max_temp) room = end;   /* the last bytes of a quota are as good as the first */
    int rc = memory_resize(m, room);
    if (rc != SQLITE_OK) return rc;
  }
  if (off > m->size) memset(m->data + m->size, 0, (size_t)(off - m->size));
  memcpy(m->data + off, buf, (size_t)n);
  if (end > m->size) m->size = end;
  return SQLITE_OK;
}

static int memory_truncate(sqlite3_file *f, i64 size) {
  Memory *m = (Memory *)f;
  if (m->journal) m->v->replaying = 0;
  if (size < m->size) m->size = size;
  return size == 0 && m->room > JOURNAL_KEEP ? memory_resize(m, 0) : SQLITE_OK;
}

static int memory_size(sqlite3_file *f, i64 *size) { *size = ((Memory *)f)->size; return SQLITE_OK; }

static const sqlite3_io_methods memory_io = {1, memory_close, memory_read, memory_write, memory_truncate, nothing_sync,
  memory_size, nothing_lock, nothing_lock, nothing_reserved, nothing_control, sector_size, device, 0, 0, 0, 0, 0, 0};

/* ------------------------------------------------------------------ one VFS per volume */

static int vfs_open(sqlite3_vfs *vfs, const char *name, sqlite3_file *f, int flags, int *out_flags) {
  Volume *v = vfs->pAppData;
  f->pMethods = NULL;
  if (flags & SQLITE_OPEN_MAIN_DB) {
    pthread_mutex_lock(&v->mutex);
    int taken = v->main_open;
    v->main_open = 1;
    pthread_mutex_unlock(&v->mutex);
    if (taken) return SQLITE_CANTOPEN;
    ((MainFile *)f)->v = v;
    f->pMethods = &main_io;
  } else {
    int journal = (flags & (SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_SUPER_JOURNAL)) != 0;
    if (flags & SQLITE_OPEN_WAL || (name && !journal)) return SQLITE_CANTOPEN;   /* a temporary file with a name is somebody else's file */
    memset(f, 0, sizeof(Memory));
    ((Memory *)f)->v = v;
    ((Memory *)f)->journal = journal;
    f->pMethods = &memory_io;
  }
  if (out_flags) *out_flags = flags;
  atomic_fetch_add(&v->open_files, 1);
  return SQLITE_OK;
}

static int vfs_delete(sqlite3_vfs *v, const char *name, int sync) { (void)v; (void)name; (void)sync; return SQLITE_OK; }
static int vfs_access(sqlite3_vfs *v, const char *name, int flags, int *out) { (void)v; (void)name; (void)flags; *out = 0; return SQLITE_OK; }
static int vfs_full_path(sqlite3_vfs *v, const char *name, int n, char *out) { (void)v; sqlite3_snprintf(n, out, "%s", name); return SQLITE_OK; }
static int vfs_random(sqlite3_vfs *v, int n, char *out) { (void)v; return host->xRandomness(host, n, out); }
static int vfs_sleep(sqlite3_vfs *v, int micros) { (void)v; return host->xSleep(host, micros); }
static int vfs_time64(sqlite3_vfs *vfs, i64 *out) {
  Volume *v = vfs->pAppData;
  if (!v->clock_ms) return host->xCurrentTimeInt64(host, out);
  *out = v->clock_ms;
  return SQLITE_OK;
}
static int vfs_time(sqlite3_vfs *vfs, double *out) {
  i64 ms;
  int rc = vfs_time64(vfs, &ms);
  *out = (double)ms / 86400000.0;
  return rc;
}
static int vfs_error(sqlite3_vfs *v, int n, char *out) { (void)v; (void)n; (void)out; return 0; }

/* ------------------------------------------------------------------ control */

EXPORT const char *cow_source(void) { return COW_SOURCE; }

/* Map a database file that nobody will change. *out: an image that shows the base as it is. The caller keeps the descriptor. */
EXPORT int cow_base_fd(int fd, int page_size, Image **out) {
  struct stat st;
  if (page_size < 512 || page_size > MAX_PAGE || (page_size & (page_size - 1))) return -EINVAL;
  if (fstat(fd, &st) || st.st_size < 512) return -EINVAL;
  void *map = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) return -errno;    /* the mapping stays when the caller closes its descriptor */
  Base *b = calloc(1, sizeof *b);
  Image *image = calloc(1, sizeof *image);
  if (!b || !image) { free(b); free(image); munmap(map, (size_t)st.st_size); return -ENOMEM; }
  atomic_init(&b->ref, 1);
  b->map = map;
  b->size = st.st_size;
  b->page_size = page_size;
  atomic_init(&image->ref, 1);
  image->tree.base = b;
  image->tree.size = image->tree.limit = b->size;
  atomic_fetch_add(&live_bases, 1);
  atomic_fetch_add(&live_images, 1);
  *out = image;
  return 0;
}

EXPORT int cow_base(const char *path, int page_size, Image **out) {
  int fd = open(path, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return -errno;
  int rc = cow_base_fd(fd, page_size, out);
  close(fd);                    /* the mapping stays; no descriptor per base */
  return rc;
}

EXPORT void cow_image_free(Image *image) {
  if (atomic_fetch_sub(&image->ref, 1) != 1) return;
  tree_clear(&image->tree);
  base_unref(image->tree.base);
  free(image);
  atomic_fetch_sub(&live_images, 1);
}

static void volume_fill_vfs(Volume *v) {
  size_t n = sizeof(Memory) > sizeof(MainFile) ? sizeof(Memory) : sizeof(MainFile);
  v->vfs = (sqlite3_vfs){.iVersion = 2, .szOsFile = (int)n, .mxPathname = 512, .zName = v->name, .pAppData = v, .xOpen = vfs_open,
    .xDelete = vfs_delete, .xAccess = vfs_access, .xFullPathname = vfs_full_path, .xRandomness = vfs_random, .xSleep = vfs_sleep,
    .xCurrentTime = vfs_time, .xGetLastError = vfs_error, .xCurrentTimeInt64 = vfs_time64};
}

/* What the volume shows becomes what the image shows; its count of differences comes along where it is of the same origin. */
static void volume_show(Volume *v, const Image *image) {
  tree_share(&v->tree, &image->tree);
  v->differs = image == v->origin ? 0 : image->origin == v->origin ? image->differs : tree_differences(&v->tree, &v->origin->tree);
  atomic_fetch_add(&v->writes, 1);
}

/* A private file with the contents of `from` (NULL: of origin). cow_restore(v, NULL) goes back to origin. clock_ms: see Volume. */
EXPORT int cow_volume(Image *origin, Image *from, const char *name, i64 max_pages, i64 max_temp, i64 clock_ms, Volume **out) {
  if (!from) from = origin;
  if (from->tree.base != origin->tree.base || strlen(name) >= sizeof((Volume *)0)->name) return -EINVAL;
  Volume *v = calloc(1, sizeof *v);
  Account *a = calloc(1, sizeof *a);
  if (!v || !a) { free(v); free(a); return -ENOMEM; }
  strcpy(v->name, name);
  atomic_init(&a->ref, 1);
  v->account = a;
  v->max_pages = max_pages;
  v->max_temp = max_temp;
  v->clock_ms = clock_ms;
  pthread_mutex_init(&v->mutex, NULL);
  atomic_fetch_add(&origin->ref, 1);
  v->origin = origin;
  volume_show(v, from);
  volume_fill_vfs(v);
  atomic_fetch_add(&live_volumes, 1);
  *out = v;
  return 0;
}

/* The gate itself opens nothing. It is registered as any VFS; the volumes' are linked in behind it by hand, under the lock that the
** library takes for its list, because sqlite3_vfs_register walks the whole list. Nobody else inserts there: the library inserts
** behind the head, which the gate never is. */
static int gate_open(sqlite3_vfs *v, const char *name, sqlite3_file *f, int flags, int *out) {
  (void)v; (void)name; (void)flags; (void)out;
  f->pMethods = NULL;
  return SQLITE_CANTOPEN;
}
static sqlite3_vfs gate = {.iVersion = 1, .szOsFile = sizeof(sqlite3_file), .mxPathname = 512, .zName = "savepoint-gate", .xOpen = gate_open,
  .xDelete = vfs_delete, .xAccess = vfs_access, .xFullPathname = vfs_full_path, .xRandomness = vfs_random, .xSleep = vfs_sleep,
  .xGetLastError = vfs_error};

static void list_place(sqlite3_vfs *vfs, sqlite3_vfs **place) {   /* another VFS's neighbour may be none of ours */
  if (vfs && vfs->xOpen == vfs_open) ((Volume *)vfs->pAppData)->place = place;
}

/* The library can open the volume by its name from now on (`on`), or no longer. Refused (-EBUSY) while one of its files is open. */
EXPORT int cow_register(Volume *v, int on) {
  if (!on && atomic_load(&v->open_files)) return -EBUSY;
  sqlite3_mutex *list = sqlite3_mutex_alloc(LIST_MUTEX);
  sqlite3_mutex_enter(list);   /* also to look at `place`: a neighbour that comes or goes moves it */
  if (on && !v->place) {
    v->vfs.pNext = gate.pNext;
    gate.pNext = &v->vfs;
    v->place = &gate.pNext;
    list_place(v->vfs.pNext, &v->vfs.pNext);
  } else if (!on && v->place) {
    *v->place = v->vfs.pNext;
    list_place(v->vfs.pNext, v->place);
    v->place = NULL;
  }
  sqlite3_mutex_leave(list);
  return 0;
}

/* Refused (-EBUSY) while a connection has one of the volume's files open. */
EXPORT int cow_volume_free(Volume *v) {
  if (atomic_load(&v->open_files)) return -EBUSY;
  cow_register(v, 0);
  tree_clear(&v->tree);
  cow_image_free(v->origin);
  account_unref(v->account);
  pthread_mutex_destroy(&v->mutex);
  free(v);
  atomic_fetch_sub(&live_volumes, 1);
  return 0;
}

/* The contents now, immutable. The caller knows that no transaction is open on the volume's connection. */
EXPORT int cow_freeze(Volume *v, Image **out) {
  Image *image = calloc(1, sizeof *image);
  if (!image) return -ENOMEM;
  pthread_mutex_lock(&v->mutex);
  tree_share(&image->tree, &v->tree);
  image->origin = v->origin;
  image->differs = v->differs;
  pthread_mutex_unlock(&v->mutex);
  atomic_init(&image->ref, 1);
  atomic_fetch_add(&image->tree.base->ref, 1);
  atomic_fetch_add(&live_images, 1);
  *out = image;
  return 0;
}

/* Go back to an image of the same base; NULL: to the origin. The connection must be closed (it caches pages). */
EXPORT int cow_restore(Volume *v, Image *image) {
  if (!image) image = v->origin;
  if (atomic_load(&v->open_files)) return -EBUSY;
  if (image->tree.base != v->tree.base) return -EINVAL;
  pthread_mutex_lock(&v->mutex);
  tree_clear(&v->tree);
  volume_show(v, image);
  pthread_mutex_unlock(&v->mutex);
  return 0;
}

/* Write pages, each [i64 number][page], and give the file its size; what a pack brought. The connection must be closed.
** On failure the volume shows a part of it: the caller restores. The quota of pages holds. */
EXPORT int cow_apply(Volume *v, const u8 *pages, i64 bytes, i64 size) {
  if (atomic_load(&v->open_files)) return -EBUSY;
  pthread_mutex_lock(&v->mutex);
  int ps = v->tree.base->page_size, rc = SQLITE_OK;
  if (bytes % (8 + ps) || size < 0) rc = SQLITE_MISUSE;
  for (i64 at = 0; rc == SQLITE_OK && at < bytes; at += 8 + ps) {
    i64 pg;
    memcpy(&pg, pages + at, 8);
    if (pg < 0 || pg >= (size + ps - 1) / ps) { rc = SQLITE_MISUSE; break; }
    rc = volume_write_page(v, pg, pages + at + 8);
    if (rc == SQLITE_OK && (pg + 1) * ps > v->tree.size) v->tree.size = (pg + 1) * ps;
  }
  if (rc == SQLITE_OK) rc = volume_truncate(v, size);
  pthread_mutex_unlock(&v->mutex);
  return rc == SQLITE_OK ? 0 : rc == SQLITE_FULL ? -ENOSPC : rc == SQLITE_MISUSE ? -EINVAL : -ENOMEM;
}

/* Called before each statement: forget what was refused, and that a rollback was under way. */
EXPORT void cow_begin(Volume *v) { v->refused = 0; v->replaying = 0; }

/* out: size, pages that differ from the origin, pages paid for, temporary bytes, refusals, whether size is the origin's, changes so far */
EXPORT void cow_stats(Volume *v, i64 *out) {
  pthread_mutex_lock(&v->mutex);
  out[0] = v->tree.size;
  out[1] = v->differs;
  out[2] = atomic_load(&v->account->pages);
  out[3] = atomic_load(&v->temp);
  out[4] = v->refused;
  out[5] = v->tree.size == v->origin->tree.size && v->tree.limit == v->origin->tree.limit;
  out[6] = atomic_load(&v->writes);
  pthread_mutex_unlock(&v->mutex);
}

EXPORT i64 cow_image_size(Image *image) { return image->tree.size; }

/* Pages in which two images of one base differ, by identity: what both share is skipped, so the cost is that of the difference. */
EXPORT i64 cow_image_differs(Image *image, Image *other) {
  return image->origin == other ? image->differs : tree_differences(&image->tree, &other->tree);
}

/* The numbers and contents of pages, ascending: [i64 number][page] each. since NULL: of all that differ from the base file;
** deterministic, equal contents over one base give equal bytes. since an image of the same base: of all that may differ
** from it, by identity. Returns the bytes needed; fills at most cap. */
EXPORT i64 cow_image_delta(Image *image, Image *since, u8 *buf, i64 cap) {
  const Tree *t = &image->tree, *s = since ? &since->tree : NULL;
  int ps = t->base->page_size;
  i64 used = 0, pages = (t->size + ps - 1) / ps;
  i64 shown = (s && s->limit < t->limit ? s->limit : t->limit) / ps;   /* below this, a bare page is the base's in both */
  Tree whole = *t;
  u8 gathered[MAX_PAGE];
  whole.limit = t->base->size;
  for (i64 pg = 0; pg < pages; pg++) {
    const Node *leaf = tree_leaf(t, pg);
    if ((pg & (FAN - 1)) == 0 && (pg | (FAN - 1)) < shown && leaf == (s ? tree_leaf(s, pg) : NULL)) { pg |= FAN - 1; continue; }
    const Page *p = leaf ? leaf->slot[slot_of(pg, 0)] : NULL;
    if (s ? p == tree_get(s, pg) && (p || base_span(t, pg) == base_span(s, pg)) && ((pg + 1) * ps <= s->size || s->size == t->size) : !p && base_span(t, pg) == base_span(&whole, pg)) continue;
    if (!p) tree_read_page(t, pg, 0, ps, gathered);
    const u8 *data = p ? p->data : gathered;
    if (!s && pg * ps < t->base->size && equals_base(&whole, pg, data)) continue;
    if (used + 8 + ps <= cap) { memcpy(buf + used, &pg, 8); memcpy(buf + used + 8, data, (size_t)ps); }
    used += 8 + ps;
  }
  return used;
}

/* Pages and temporary files of this process may take `bytes` of memory (0: no bound); pages beyond go to the file behind fd, up to max_spill. */
EXPORT int cow_budget(i64 bytes, int fd, i64 max_spill) {
  pthread_mutex_lock(&spill_mutex);
  int busy = spill_size != 0 && fd != spill_fd;
  if (!busy) { memory_budget = bytes; spill_fd = fd; spill_max = max_spill; }
  pthread_mutex_unlock(&spill_mutex);
  return busy ? -EBUSY : 0;
}

EXPORT i64 cow_live(int what) {
  switch (what) {
    case 0: return atomic_load(&live_pages);
    case 1: return atomic_load(&live_volumes);
    case 2: return atomic_load(&live_images);
    case 3: return atomic_load(&live_bases);
    case 4: return atomic_load(&live_nodes);
    case 5: return atomic_load(&memory_used);
    default: return spill_size;
  }
}

EXPORT int sqlite3_cowvfs_init(sqlite3 *db, char **error, const sqlite3_api_routines *api) {
  (void)db; (void)error;
  SQLITE_EXTENSION_INIT2(api);
  if (host) return SQLITE_OK_LOAD_PERMANENTLY;
  host = sqlite3_vfs_find(0);
  return host && sqlite3_vfs_register(&gate, 0) == SQLITE_OK ? SQLITE_OK_LOAD_PERMANENTLY : SQLITE_ERROR;
}
