/* Four threads lease, write, freeze, fork, vacuum, restore and drop volumes over one image: run under the sanitizers.
**   cc -DSQLITE_CORE -fsanitize=thread tests/state/stress.c -lsqlite3 -lpthread -o stress && ./stress some.sqlite
*/
#include "../../src/savepoint/state/sqlite/cowvfs.c"
#include <assert.h>

static Image *base, *task;

static sqlite3 *connect_to(Volume *v) {
  sqlite3 *db;
  assert(cow_register(v, 1) == 0);
  if (sqlite3_open_v2("database", &db, SQLITE_OPEN_READWRITE, v->name)) { fprintf(stderr, "open: %s\n", sqlite3_errmsg(db)); exit(1); }
  sqlite3_exec(db, "PRAGMA locking_mode=exclusive; PRAGMA journal_mode=truncate; PRAGMA cache_size=-64", 0, 0, 0);
  return db;
}

static int run(sqlite3 *db, const char *sql) { return sqlite3_exec(db, sql, 0, 0, 0); }

static void check(sqlite3 *db) {
  sqlite3_stmt *s;
  assert(sqlite3_prepare_v2(db, "PRAGMA integrity_check", -1, &s, 0) == SQLITE_OK && sqlite3_step(s) == SQLITE_ROW);
  if (strcmp((const char *)sqlite3_column_text(s, 0), "ok")) { fprintf(stderr, "corrupt: %s\n", sqlite3_column_text(s, 0)); exit(2); }
  sqlite3_finalize(s);
}

static void *work(void *arg) {
  long number = (long)arg;
  char name[48];
  for (int round = 0; round < 8; round++) {
    Volume *v, *f;
    Image *snapshot;
    i64 numbers[7];
    snprintf(name, sizeof name, "volume-%ld-%d", number, round);
    assert(cow_volume(task, NULL, name, round % 2 ? 60 : 100000, 1 << 28, 0, &v) == 0);
    sqlite3 *db = connect_to(v);
    run(db, "UPDATE orders SET amount = amount + 1 WHERE id % 3 = 0");
    run(db, "CREATE TABLE z AS SELECT * FROM orders WHERE id < 500");
    check(db);
    assert(cow_freeze(v, &snapshot) == 0);
    u8 *delta = malloc((size_t)cow_image_delta(snapshot, NULL, NULL, 0) + 1);
    cow_image_delta(snapshot, NULL, delta, cow_image_delta(snapshot, NULL, NULL, 0));
    i64 since = cow_image_delta(snapshot, task, NULL, 0), all = cow_image_delta(snapshot, NULL, NULL, 0);
    assert(since <= all + 4104 * 100);
    free(delta);
    snprintf(name, sizeof name, "fork-%ld-%d", number, round);
    assert(cow_volume(task, snapshot, name, 100000, 1 << 28, 0, &f) == 0);
    sqlite3 *fork = connect_to(f);
    run(fork, "DELETE FROM orders WHERE id < 2000; VACUUM; CREATE TEMP TABLE t AS SELECT * FROM orders ORDER BY note DESC");
    check(fork);
    cow_begin(v);
    run(db, "BEGIN; DROP TABLE orders; CREATE TABLE y(a); ROLLBACK; DELETE FROM customer; VACUUM");
    check(db);
    cow_stats(v, numbers);
    assert(cow_volume_free(v) == -EBUSY && cow_restore(v, snapshot) == -EBUSY);
    sqlite3_close(db);
    assert(cow_restore(v, snapshot) == 0);
    db = connect_to(v);
    check(db);
    sqlite3_close(db);
    cow_image_free(snapshot);
    assert(cow_restore(v, NULL) == 0);
    cow_stats(v, numbers);
    assert(numbers[1] == 0 && numbers[5]);
    sqlite3_close(fork);
    assert(cow_volume_free(f) == 0 && cow_volume_free(v) == 0);
  }
  return NULL;
}

int main(int argc, char **argv) {
  pthread_t threads[4];
  Volume *v;
  (void)argc;
  sqlite3_initialize();
  sqlite3_cowvfs_init(NULL, NULL, NULL);
  assert(cow_base(argv[1], 4096, &base) == 0);
  assert(cow_volume(base, NULL, "setup", 100000, 1 << 28, 0, &v) == 0);
  sqlite3 *db = connect_to(v);
  run(db, "UPDATE customer SET balance = 1");
  sqlite3_close(db);
  assert(cow_freeze(v, &task) == 0 && cow_volume_free(v) == 0);
  for (long i = 0; i < 4; i++) pthread_create(&threads[i], 0, work, (void *)i);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], 0);
  cow_image_free(task);
  cow_image_free(base);
  for (int what = 0; what < 6; what++) if (cow_live(what)) { fprintf(stderr, "leaked %lld of kind %d\n", cow_live(what), what); return 3; }
  return 0;
}
