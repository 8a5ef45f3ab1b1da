/*
** cowvfs.c -- a copy-on-write VFS for SQLite: one immutable base file, one small page delta per session.
**
** The idea. A base database is mapped read-only (PROT_READ), once, however many sessions read it. What a
** session writes goes to pages of its own, found through a two-level page table:
**
**      Volume (a session's file)          Image (immutable: a snapshot, a derived image, or the bare base)
**        Tree  size, limit, l1 --+          Tree  size, limit, l1 --+
**                                |                                  |
**                     l1[0] -> Chunk (64 slots) <-------------------+   shared, reference counted
**                     l1[1] -> NULL: the base shows through
**                                 slot -> Page (page_size bytes), reference counted; NULL: the base shows
**
** A snapshot copies the l1 array (8 bytes for 64 pages) and counts references: its cost depends neither on
** the base nor on the delta. Whoever writes to something shared copies it first.
**
** Rules that make it safe to give to an agent:
**   - Each volume registers a VFS of its own, which opens its own volume once and nothing else. No SQL, however
**     it spells a file name, can name another session or a file on the disk.
**   - A write that changes nothing costs nothing; a page that becomes equal to the base (or to the image the
**     session began with) is given back. So a rollback frees what the transaction took.
**   - Quotas are per volume: pages (also those that only its snapshots keep) and temporary bytes (journals,
**     TEMP tables, sorters). While a journal is being read back, that is during a rollback, the page quota does
**     not apply: a rollback must never fail for want of room.
**   - Every allocation is checked; failure leaves the tree as it was.
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
#define FAN 64                  /* pages per chunk; measured: the knee of memory per session (512 costs a third more) */
#define JOURNAL_START 8192      /* first allocation of a rollback journal */
#define JOURNAL_KEEP 65536      /* a truncated journal keeps a buffer up to this size for the next transaction */
#define MAX_PAGE 65536          /* SQLite's largest page */

/* ------------------------------------------------------------------ pages, chunks, trees */

/* Who pays for a page: the volume that made it. Outlives the volume while one of its pages is alive. */
typedef struct Account { atomic_int ref; atomic_llong pages; } Account;
typedef struct Page { atomic_int ref; Account *payer; u8 data[]; } Page;
typedef struct Chunk { atomic_int ref; Page *slot[FAN]; } Chunk;
typedef struct Base { atomic_int ref; const u8 *map; i64 size; int page_size; } Base;

/* size: bytes of the file. limit: bytes of the base that still show (a truncated file never shows them again). */
typedef struct Tree { Base *base; i64 size, limit; Chunk **l1; i64 n_l1; } Tree;
typedef struct Image { atomic_int ref; Tree tree; } Image;

typedef struct Volume {
  sqlite3_vfs vfs;              /* this volume's own VFS; pAppData points back here */
  char name[48];
  pthread_mutex_t mutex;
  Tree tree;
  Image *origin;                /* what the lease began with; reset goes back to it */
  Account *account;
  i64 max_pages, max_temp;
  atomic_llong temp;            /* bytes of journals and temporary files now held */
  atomic_int open_files;
  int main_open;
  int replaying;                /* a journal is being read back: a rollback is under way */
  int refused;                  /* since cow_begin: 1 page quota, 2 temp quota, 4 the host's disk is full */
} Volume;

static sqlite3_vfs *host;       /* the library's default VFS: clock, randomness, real temporary files */
static atomic_llong live_pages, live_volumes, live_images, live_bases;

static void account_unref(Account *a) { if (atomic_fetch_sub(&a->ref, 1) == 1) free(a); }

static void page_unref(Page *p) {
  if (!p || atomic_fetch_sub(&p->ref, 1) != 1) return;
  atomic_fetch_sub(&p->payer->pages, 1);
  account_unref(p->payer);
  free(p);
  atomic_fetch_sub(&live_pages, 1);
}

static Page *page_new(Account *payer, int page_size) {
  Page *p = malloc(sizeof(Page) + (size_t)page_size);
  if (!p) return NULL;
  atomic_init(&p->ref, 1);
  p->payer = payer;
  atomic_fetch_add(&payer->ref, 1);
  atomic_fetch_add(&payer->pages, 1);
  atomic_fetch_add(&live_pages, 1);
  return p;
}

static void chunk_unref(Chunk *c) {
  if (!c || atomic_fetch_sub(&c->ref, 1) != 1) return;
  for (int i = 0; i < FAN; i++) page_unref(c->slot[i]);
  free(c);
}

static void base_unref(Base *b) {
  if (atomic_fetch_sub(&b->ref, 1) != 1) return;
  munmap((void *)b->map, (size_t)b->size);
  free(b);
  atomic_fetch_sub(&live_bases, 1);
}

static Page *tree_get(const Tree *t, i64 pg) {
  i64 c = pg / FAN;
  return c < t->n_l1 && t->l1[c] ? t->l1[c]->slot[pg % FAN] : NULL;
}

static void tree_clear(Tree *t) {
  for (i64 i = 0; i < t->n_l1; i++) chunk_unref(t->l1[i]);
  free(t->l1);
  t->l1 = NULL;
  t->n_l1 = 0;
}

/* dst becomes another reference to everything in src. dst must hold nothing. */
static int tree_share(Tree *dst, const Tree *src) {
  Chunk **l1 = NULL;
  if (src->n_l1) {
    l1 = malloc((size_t)src->n_l1 * sizeof *l1);
    if (!l1) return -ENOMEM;
    for (i64 i = 0; i < src->n_l1; i++) {
      l1[i] = src->l1[i];
      if (l1[i]) atomic_fetch_add(&l1[i]->ref, 1);
    }
  }
  *dst = *src;
  dst->l1 = l1;
  return 0;
}

/* The chunk of page pg, made private to this tree. NULL: out of memory, nothing changed. */
static Chunk *tree_own_chunk(Tree *t, i64 pg) {
  i64 c = pg / FAN;
  if (c >= t->n_l1) {
    i64 n = c + 1 > t->n_l1 * 2 ? c + 1 : t->n_l1 * 2;
    Chunk **l1 = realloc(t->l1, (size_t)n * sizeof *l1);
    if (!l1) return NULL;
    memset(l1 + t->n_l1, 0, (size_t)(n - t->n_l1) * sizeof *l1);
    t->l1 = l1;
    t->n_l1 = n;
  }
  Chunk *old = t->l1[c];
  if (old && atomic_load(&old->ref) == 1) return old;
  Chunk *own = calloc(1, sizeof *own);
  if (!own) return NULL;
  atomic_init(&own->ref, 1);
  if (old) {
    for (int i = 0; i < FAN; i++) {
      own->slot[i] = old->slot[i];
      if (own->slot[i]) atomic_fetch_add(&own->slot[i]->ref, 1);
    }
    chunk_unref(old);
  }
  return t->l1[c] = own;
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

/* Pages that one shows otherwise than the other, by identity: shared chunks and pages are equal without a look. */
static i64 tree_differences(const Tree *a, const Tree *b) {
  i64 n = a->n_l1 > b->n_l1 ? a->n_l1 : b->n_l1, count = 0;
  for (i64 c = 0; c < n; c++) {
    const Chunk *x = c < a->n_l1 ? a->l1[c] : NULL, *y = c < b->n_l1 ? b->l1[c] : NULL;
    if (x == y) continue;
    for (int i = 0; i < FAN; i++) count += (x ? x->slot[i] : NULL) != (y ? y->slot[i] : NULL);
  }
  return count;
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
  Chunk *c = tree_own_chunk(t, pg);
  if (!c) return SQLITE_IOERR_NOMEM;
  current = c->slot[pg % FAN];
  if (back_to_image || back_to_base) {
    if (back_to_image) atomic_fetch_add(&began->ref, 1);
    c->slot[pg % FAN] = back_to_image ? began : NULL;
    page_unref(current);
    return SQLITE_OK;
  }
  if (!current || atomic_load(&current->ref) > 1) {
    if (!v->replaying && atomic_load(&v->account->pages) >= v->max_pages) { v->refused |= 1; return SQLITE_FULL; }
    Page *own = page_new(v->account, ps);
    if (!own) return SQLITE_IOERR_NOMEM;
    page_unref(current);
    c->slot[pg % FAN] = current = own;
  }
  memcpy(current->data, data, (size_t)ps);
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

/* Sizes are whole pages whenever SQLite truncates a database: only slots are dropped, no page is rewritten. */
static int main_truncate(sqlite3_file *f, i64 size) {
  Volume *v = ((MainFile *)f)->v;
  int rc = SQLITE_OK;
  pthread_mutex_lock(&v->mutex);
  Tree *t = &v->tree;
  int ps = t->base->page_size;
  i64 first = (size + ps - 1) / ps;
  if (size % ps) rc = SQLITE_IOERR_TRUNCATE;
  for (i64 c = first / FAN; rc == SQLITE_OK && c < t->n_l1; c++) {
    if (!t->l1[c]) continue;
    if (c * FAN >= first) { chunk_unref(t->l1[c]); t->l1[c] = NULL; continue; }
    Chunk *own = tree_own_chunk(t, first);
    if (!own) { rc = SQLITE_IOERR_NOMEM; break; }
    for (i64 i = first % FAN; i < FAN; i++) { page_unref(own->slot[i]); own->slot[i] = NULL; }
  }
  if (rc == SQLITE_OK) {
    if (size < t->limit) t->limit = size;
    t->size = size;
  }
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

/* ------------------------------------------------------------------ rollback journals, in memory, on the session's account */

typedef struct Journal { sqlite3_file base; Volume *v; u8 *data; i64 size, room; } Journal;

static int journal_close(sqlite3_file *f) {
  Journal *j = (Journal *)f;
  j->v->replaying = 0;
  atomic_fetch_sub(&j->v->temp, j->room);
  free(j->data);
  j->data = NULL;
  atomic_fetch_sub(&j->v->open_files, 1);
  return SQLITE_OK;
}

static int journal_read(sqlite3_file *f, void *buf, int n, i64 off) {
  Journal *j = (Journal *)f;
  i64 got = j->size - off < n ? j->size - off : n;
  if (got < 0) got = 0;
  j->v->replaying = 1;          /* SQLite reads a journal for no other reason */
  if (got) memcpy(buf, j->data + off, (size_t)got);
  if (got == n) return SQLITE_OK;
  memset((u8 *)buf + got, 0, (size_t)(n - got));
  return SQLITE_IOERR_SHORT_READ;
}

static int journal_write(sqlite3_file *f, const void *buf, int n, i64 off) {
  Journal *j = (Journal *)f;
  Volume *v = j->v;
  i64 end = off + n;
  v->replaying = 0;
  if (end > j->room) {
    i64 room = j->room ? j->room : JOURNAL_START;
    while (room < end) room *= 2;
    if (atomic_load(&v->temp) + room - j->room > v->max_temp) { v->refused |= 2; return SQLITE_FULL; }
    u8 *data = realloc(j->data, (size_t)room);
    if (!data) return SQLITE_IOERR_NOMEM;
    atomic_fetch_add(&v->temp, room - j->room);
    j->data = data;
    j->room = room;
  }
  if (off > j->size) memset(j->data + j->size, 0, (size_t)(off - j->size));
  memcpy(j->data + off, buf, (size_t)n);
  if (end > j->size) j->size = end;
  return SQLITE_OK;
}

static int journal_truncate(sqlite3_file *f, i64 size) {
  Journal *j = (Journal *)f;
  j->v->replaying = 0;
  if (size < j->size) j->size = size;
  if (size == 0 && j->room > JOURNAL_KEEP) {
    free(j->data);
    atomic_fetch_sub(&j->v->temp, j->room);
    j->data = NULL;
    j->room = 0;
  }
  return SQLITE_OK;
}

static int journal_size(sqlite3_file *f, i64 *size) { *size = ((Journal *)f)->size; return SQLITE_OK; }

static const sqlite3_io_methods journal_io = {1, journal_close, journal_read, journal_write, journal_truncate, nothing_sync,
  journal_size, nothing_lock, nothing_lock, nothing_reserved, nothing_control, sector_size, device, 0, 0, 0, 0, 0, 0};

/* ------------------------------------------------------------------ TEMP tables, sorters: the host's files, on the session's account */

typedef struct Temp { sqlite3_file base; Volume *v; i64 size; } Temp;
#define HOST_FILE(f) ((sqlite3_file *)&((Temp *)(f))[1])

static int temp_close(sqlite3_file *f) {
  Temp *t = (Temp *)f;
  sqlite3_file *h = HOST_FILE(f);
  atomic_fetch_sub(&t->v->temp, t->size);
  int rc = h->pMethods ? h->pMethods->xClose(h) : SQLITE_OK;
  atomic_fetch_sub(&t->v->open_files, 1);
  return rc;
}

static int temp_read(sqlite3_file *f, void *buf, int n, i64 off) { return HOST_FILE(f)->pMethods->xRead(HOST_FILE(f), buf, n, off); }

static int temp_write(sqlite3_file *f, const void *buf, int n, i64 off) {
  Temp *t = (Temp *)f;
  Volume *v = t->v;
  i64 grow = off + n - t->size;
  if (grow > 0) {
    if (atomic_load(&v->temp) + grow > v->max_temp) { v->refused |= 2; return SQLITE_FULL; }
    atomic_fetch_add(&v->temp, grow);
    t->size += grow;
  }
  int rc = HOST_FILE(f)->pMethods->xWrite(HOST_FILE(f), buf, n, off);
  if (rc == SQLITE_FULL) v->refused |= 4;
  return rc;
}

static int temp_truncate(sqlite3_file *f, i64 size) {
  Temp *t = (Temp *)f;
  int rc = HOST_FILE(f)->pMethods->xTruncate(HOST_FILE(f), size);
  if (rc == SQLITE_OK && size < t->size) { atomic_fetch_sub(&t->v->temp, t->size - size); t->size = size; }
  return rc;
}

static int temp_size(sqlite3_file *f, i64 *size) { return HOST_FILE(f)->pMethods->xFileSize(HOST_FILE(f), size); }

static const sqlite3_io_methods temp_io = {1, temp_close, temp_read, temp_write, temp_truncate, nothing_sync, temp_size,
  nothing_lock, nothing_lock, nothing_reserved, nothing_control, sector_size, device, 0, 0, 0, 0, 0, 0};

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
  } else if (flags & (SQLITE_OPEN_MAIN_JOURNAL | SQLITE_OPEN_SUPER_JOURNAL)) {
    memset(f, 0, sizeof(Journal));
    ((Journal *)f)->v = v;
    f->pMethods = &journal_io;
  } else if (flags & SQLITE_OPEN_WAL || name) {
    return SQLITE_CANTOPEN;     /* no WAL, and a temporary file with a name is somebody else's file */
  } else {
    Temp *t = (Temp *)f;
    memset(t, 0, sizeof *t + (size_t)host->szOsFile);
    t->v = v;
    int rc = host->xOpen(host, NULL, HOST_FILE(f), flags, out_flags);
    if (rc != SQLITE_OK) return rc;
    f->pMethods = &temp_io;
    atomic_fetch_add(&v->open_files, 1);
    return SQLITE_OK;
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
static int vfs_time(sqlite3_vfs *v, double *out) { (void)v; return host->xCurrentTime(host, out); }
static int vfs_time64(sqlite3_vfs *v, i64 *out) { (void)v; return host->xCurrentTimeInt64(host, out); }
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
  size_t n = sizeof(Temp) + (size_t)host->szOsFile;
  if (n < sizeof(Journal)) n = sizeof(Journal);
  v->vfs = (sqlite3_vfs){.iVersion = 2, .szOsFile = (int)n, .mxPathname = 512, .zName = v->name, .pAppData = v, .xOpen = vfs_open,
    .xDelete = vfs_delete, .xAccess = vfs_access, .xFullPathname = vfs_full_path, .xRandomness = vfs_random, .xSleep = vfs_sleep,
    .xCurrentTime = vfs_time, .xGetLastError = vfs_error, .xCurrentTimeInt64 = vfs_time64};
}

/* A private file with the contents of `from`, which also is what cow_restore(v, NULL) goes back to when origin is NULL. */
EXPORT int cow_volume(Image *origin, Image *from, const char *name, i64 max_pages, i64 max_temp, Volume **out) {
  if (!from) from = origin;
  if (from->tree.base != origin->tree.base || strlen(name) >= sizeof((Volume *)0)->name) return -EINVAL;
  Volume *v = calloc(1, sizeof *v);
  Account *a = calloc(1, sizeof *a);
  if (!v || !a || tree_share(&v->tree, &from->tree)) { free(v); free(a); return -ENOMEM; }
  strcpy(v->name, name);
  atomic_init(&a->ref, 1);
  v->account = a;
  v->max_pages = max_pages;
  v->max_temp = max_temp;
  pthread_mutex_init(&v->mutex, NULL);
  atomic_fetch_add(&origin->ref, 1);
  v->origin = origin;
  volume_fill_vfs(v);
  if (sqlite3_vfs_register(&v->vfs, 0) != SQLITE_OK) {
    tree_clear(&v->tree);
    atomic_fetch_sub(&origin->ref, 1);
    pthread_mutex_destroy(&v->mutex);
    account_unref(a);
    free(v);
    return -ENOMEM;
  }
  atomic_fetch_add(&live_volumes, 1);
  *out = v;
  return 0;
}

/* Refused (-EBUSY) while a connection has one of the volume's files open. */
EXPORT int cow_volume_free(Volume *v) {
  if (atomic_load(&v->open_files)) return -EBUSY;
  sqlite3_vfs_unregister(&v->vfs);
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
  int rc = tree_share(&image->tree, &v->tree);
  pthread_mutex_unlock(&v->mutex);
  if (rc) { free(image); return rc; }
  atomic_init(&image->ref, 1);
  atomic_fetch_add(&image->tree.base->ref, 1);
  atomic_fetch_add(&live_images, 1);
  *out = image;
  return 0;
}

/* Go back to an image of the same base; NULL: to the origin. The connection must be closed (it caches pages). */
EXPORT int cow_restore(Volume *v, Image *image) {
  Tree fresh;
  if (!image) image = v->origin;
  if (atomic_load(&v->open_files)) return -EBUSY;
  if (image->tree.base != v->tree.base) return -EINVAL;
  pthread_mutex_lock(&v->mutex);
  int rc = tree_share(&fresh, &image->tree);
  if (rc == 0) { tree_clear(&v->tree); v->tree = fresh; }
  pthread_mutex_unlock(&v->mutex);
  return rc;
}

/* Called before each statement: forget what was refused, and that a rollback was under way. */
EXPORT void cow_begin(Volume *v) { v->refused = 0; v->replaying = 0; }

/* out: size, pages that differ from the origin, pages paid for, temporary bytes, refusals, whether size is the origin's */
EXPORT void cow_stats(Volume *v, i64 *out) {
  pthread_mutex_lock(&v->mutex);
  out[0] = v->tree.size;
  out[1] = tree_differences(&v->tree, &v->origin->tree);
  out[2] = atomic_load(&v->account->pages);
  out[3] = atomic_load(&v->temp);
  out[4] = v->refused;
  out[5] = v->tree.size == v->origin->tree.size && v->tree.limit == v->origin->tree.limit;
  pthread_mutex_unlock(&v->mutex);
}

EXPORT i64 cow_image_size(Image *image) { return image->tree.size; }

/* The numbers and contents of all pages that differ from the base file, ascending: [i64 number][page] each. Pages past the
** end of the base always differ; pages that a truncation hid and that came back as zeros are compared like the rest.
** Returns the bytes needed; fills at most cap. Deterministic: equal contents over one base give equal bytes. */
EXPORT i64 cow_image_delta(Image *image, u8 *buf, i64 cap) {
  const Tree *t = &image->tree;
  int ps = t->base->page_size;
  i64 used = 0, pages = (t->size + ps - 1) / ps, hidden = t->limit / ps;
  Tree whole = *t;
  whole.limit = t->base->size;
  for (i64 pg = 0; pg < pages; pg++) {
    if ((pg | (FAN - 1)) < hidden && (pg / FAN >= t->n_l1 || !t->l1[pg / FAN])) { pg |= FAN - 1; continue; }   /* a chunk of bare base */
    const Page *p = tree_get(t, pg);
    u8 zero[MAX_PAGE];
    if (!p) {
      if (base_span(t, pg) == base_span(&whole, pg)) continue;
      tree_read_page(t, pg, 0, ps, zero);
    }
    const u8 *data = p ? p->data : zero;
    if (pg * ps < t->base->size && equals_base(&whole, pg, data)) continue;
    if (used + 8 + ps <= cap) { memcpy(buf + used, &pg, 8); memcpy(buf + used + 8, data, (size_t)ps); }
    used += 8 + ps;
  }
  return used;
}

EXPORT i64 cow_live(int what) {
  return what == 0 ? atomic_load(&live_pages) : what == 1 ? atomic_load(&live_volumes) : what == 2 ? atomic_load(&live_images) : atomic_load(&live_bases);
}

EXPORT int sqlite3_cowvfs_init(sqlite3 *db, char **error, const sqlite3_api_routines *api) {
  (void)db; (void)error;
  SQLITE_EXTENSION_INIT2(api);
  if (!host) host = sqlite3_vfs_find(0);
  return host ? SQLITE_OK_LOAD_PERMANENTLY : SQLITE_ERROR;
}
