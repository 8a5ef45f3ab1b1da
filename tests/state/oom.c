/* Lets one allocation of the VFS fail, the first, the second, ... in turn: nothing may crash, leak or corrupt.
**   cc -DSQLITE_CORE -fsanitize=address tests/state/oom.c -lsqlite3 -lpthread -o oom && ./oom some.sqlite
*/
#include <stdlib.h>
static long countdown, allocations;
static int fails(void) { allocations++; return countdown > 0 && --countdown == 0; }
static void *test_malloc(size_t n) { return fails() ? NULL : malloc(n); }
static void *test_calloc(size_t n, size_t m) { return fails() ? NULL : calloc(n, m); }
static void *test_realloc(void *p, size_t n) { return fails() ? NULL : realloc(p, n); }
#define malloc test_malloc
#define calloc test_calloc
#define realloc test_realloc
#include <sys/mman.h>
#include <errno.h>
#include <unistd.h>
static void *test_mmap(void *a, size_t n, int p, int f, int d, off_t o) { return fails() ? (errno = ENOMEM, MAP_FAILED) : mmap(a, n, p, f, d, o); }
static int test_ftruncate(int d, off_t n) { return fails() ? (errno = ENOSPC, -1) : ftruncate(d, n); }
#define mmap test_mmap
#define ftruncate test_ftruncate
#include "../../src/savepoint/state/sqlite/cowvfs.c"
#include <assert.h>

static sqlite3 *connect_to(Volume *v) {
  sqlite3 *db;
  assert(cow_register(v, 1) == 0);
  assert(sqlite3_open_v2("database", &db, SQLITE_OPEN_READWRITE, v->name) == SQLITE_OK);
  sqlite3_exec(db, "PRAGMA locking_mode=exclusive; PRAGMA journal_mode=truncate; PRAGMA cache_size=-16", 0, 0, 0);
  return db;
}

static void check(sqlite3 *db, long n) {
  sqlite3_stmt *s;
  assert(sqlite3_prepare_v2(db, "PRAGMA integrity_check", -1, &s, 0) == SQLITE_OK && sqlite3_step(s) == SQLITE_ROW);
  if (strcmp((const char *)sqlite3_column_text(s, 0), "ok")) { fprintf(stderr, "corrupt after failure %ld: %s\n", n, sqlite3_column_text(s, 0)); exit(2); }
  sqlite3_finalize(s);
}

/* One life of a session, allocation n fails. */
static void life(const char *path, long n) {
  Image *base, *snapshot = NULL;
  Volume *v;
  countdown = n;
  if (cow_base(path, 4096, &base)) return;
  if (cow_volume(base, NULL, "v", 100000, 1 << 28, 0, &v) == 0) {
    sqlite3 *db = connect_to(v);
    sqlite3_exec(db, "UPDATE orders SET amount = amount + 1 WHERE id % 3 = 0", 0, 0, 0);
    sqlite3_exec(db, "BEGIN; DROP TABLE customer; CREATE TABLE y AS SELECT * FROM orders; ROLLBACK; DELETE FROM orders WHERE id % 2; VACUUM", 0, 0, 0);
    sqlite3_exec(db, "ROLLBACK", 0, 0, 0);
    int frozen = cow_freeze(v, &snapshot) == 0;
    sqlite3_exec(db, "DELETE FROM orders WHERE id < 50", 0, 0, 0);
    check(db, n);
    sqlite3_close(db);
    if (frozen) {
      if (cow_restore(v, snapshot) == 0) { db = connect_to(v); check(db, n); sqlite3_close(db); }
      cow_image_free(snapshot);
    }
    countdown = 0;
    assert(cow_restore(v, NULL) == 0);
    assert(cow_volume_free(v) == 0);
  }
  cow_image_free(base);
  for (int what = 0; what < 6; what++) if (cow_live(what)) { fprintf(stderr, "leak of kind %d after failure %ld\n", what, n); exit(3); }
}

int main(int argc, char **argv) {
  (void)argc;
  sqlite3_initialize();
  sqlite3_cowvfs_init(NULL, NULL, NULL);
  FILE *spill = tmpfile();      /* little memory, so that most pages go to the file: its growth and its mapping may fail too */
  assert(cow_budget(200 << 10, fileno(spill), 64 << 20) == 0);
  allocations = 0;
  life(argv[1], 0);
  long all = allocations;
  for (long n = 1; n <= all; n++) life(argv[1], n);
  printf("%ld allocations\n", all);
  return 0;
}
