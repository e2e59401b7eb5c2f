/* Rows of any length: a second ring, of pages, beside the ring of rows. Writers take a run of pages, fill it, and then
 * write the row that names it. Learners absorb, draw, copy the run and look at its words. Deaths at any step, and a
 * judge once all is quiet. README.md says what is left out, and test_protocol_model.py how it is run.
 *
 * A row's content names it: writer * 4 + number, of four at the most. All its pages have that content. An item is a row.
 *
 *   CAP PAGES      slots; pages. MAXT MAXP: tickets of each that are issued before writers stop
 *   ROWS1..3       rows of each writer. SIZES1..3: two bits a row say how many pages it has
 *   ROUNDS         draws of the learner; 0: there is none
 *   QUEUE          writers wait for room, and the learner draws each row once
 *   WKILL          writers may be killed between any two steps. Writer 3 takes the first id that becomes free
 *   LKILL          the learner may be killed between any two stores
 *   K              who is killed, at any moment (writers 1-3, learner 4)
 *   STOP           a writer that is stopped at any moment, for good. It lives
 *   GOON           there are tickets enough: whoever lives writes all its rows
 * and every naive variant is a flag by itself.
 */
#define NO     255
#define IDS    2
#define JUDGE  6
#define CLEAN  0
#define SLOTS  1

#define SLOT(key1)       (((key1) - 1) % CAP)
#define PAGE(key1)       (((key1) - 1) % PAGES)
#define BUSYW(key1, id)  ((key1) << 4 | (id) << 1 | 1)
#define DONE(key1, id)   ((key1) << 4 | (id) << 1)
#define VOID(key1)       ((key1) << 4)
#define BUSY(w)          ((w) & 1)
#define ID(w)            ((w) >> 1 & 7)
#define LIVE(w)          (!BUSY(w) && ID(w))
#define KEY1(w)          ((w) >> 4)                      /* ticket + 1; 0: never written */
#define NEWEST1(s, h)    ((s) < (h) -> (h) - ((h) - 1 - (s)) % CAP : 0)

/* The writers' scripts, by content. */
#define NUMBER(c)  ((c) % 4)
#define SIZE(c)    (((c) / 4 == 1 -> SIZES1 : ((c) / 4 == 2 -> SIZES2 : SIZES3)) >> (2 * NUMBER(c)) & 3)

/* A run does not go over the end of the ring: it skips to the start. Nor is one begun that would meet a busy page: the
 * tickets before it are skipped as well. */
#define MEETS_BUSY(h, n)  (BUSY(page_word[(h) % PAGES]) || ((n) == 2 && BUSY(page_word[((h) + 1) % PAGES])))
#define ROOM_FROM(h)  (START(h, size) + size <= page_limit && !MEETS_BUSY(START(h, size), size))
#define START(h, n)  ((h) % PAGES + (n) > PAGES -> (h) + PAGES - (h) % PAGES : (h))

/* What is under the mutex alone is one step, unless its holder may be killed in between. */
#ifdef LKILL
#define ONE_STEP
#else
#define ONE_STEP atomic
#endif

/* In a queue no row changes under who absorbs it. */
#if QUEUE
#define ROWS_STEP atomic
#else
#define ROWS_STEP
#endif

/* A verdict has a name: it is what the verifier prints. */
#define MUST(verdict, condition) verdict = (condition); assert(verdict)
hidden byte copy_is_whole, copy_is_the_row_drawn, failed_draw_is_gone, drawable_has_its_pages, row_is_kept, needed_row_stays;
hidden byte no_slot_stays_busy, no_page_stays_busy, every_row_is_absorbed, pending_is_a_lost_ticket, writers_go_on;
hidden byte every_row_is_delivered, no_room_is_lost;

/* The rings. A row's content and its first page's ticket + 1 (0: it has none) are there while its word is not busy. */
byte head, page_head;
byte word[CAP], row[CAP], first1[CAP];
byte page_word[PAGES], page[PAGES];

/* Those who take part: byte locks (0: free), the ticket in flight, and the run in flight: its first ticket + 1, its pages. */
byte holder[IDS + 1], in_flight[IDS + 1], run1_of[IDS + 1], size_of[IDS + 1];
bit joined[IDS + 1];

/* Under the mutex. `followed`: page tickets below are followed. `run1`: of the row absorbed there. `owner1`: the slot + 1
 * of the row whose run begins at that page. */
byte mutex, absorbed, followed, dirty;
byte at[CAP], run1[CAP], owner1[PAGES];
bit leaf[CAP], pending[CAP], owner_died;

#if QUEUE
byte ticket_limit = CAP, page_limit = PAGES, needed_from, page_needed_from;
bit held[CAP], fresh, over, sleeps[5];
byte quiet;
#endif

/* Ghosts, and the end. */
byte killed, stopped, finished;
#if QUEUE
bit written[17], delivered[17];                          /* by content */
#define NOTE_CONTENT(key1, c)
#else
byte content_of[MAXT + 1];                               /* of the row with that key + 1 */
#define NOTE_CONTENT(key1, c)  content_of[key1] = c
#endif
#define KILLED(who)   (killed >> (who) & 1)
#define STOPPED(who)  (stopped >> (who) & 1)

/* ---- Under the mutex: variables of whoever holds it ---- */

#define ABSORBER  byte H, c, i, p, newest1, w, r_first1; bit wait, ok

inline forget() {
  d_step { H = 0; c = 0; i = 0; p = 0; newest1 = 0; w = 0; r_first1 = 0; wait = 0; ok = 0 }
}

inline evict(slot) {
  leaf[slot] = 0;
#if QUEUE
  held[slot] = 0;
#endif
  at[slot] = 0
}

/* The row's first page is taken again after `followed`: that will evict it. */
inline adopt(slot) {
  run1[slot] = r_first1;
  if :: r_first1 -> owner1[PAGE(r_first1)] = slot + 1 :: else fi;
  at[slot] = KEY1(w);
  leaf[slot] = 1
}

#if QUEUE
#define PASSED(w)  (KEY1(w) < newest1)                   /* the order is by key: an older row may not stay */
#else
#define PASSED(w)  0
#endif

#if defined(NOWAIT) || defined(NOFOLLOW)
#define IS_NEW  0
#else
#define IS_NEW  (ok && r_first1 > followed)
#endif
#if defined(ADOPTGONE) || defined(NOFOLLOW)
#define IS_OLD  0
#else
#define IS_OLD  (ok && r_first1 && r_first1 + PAGES <= followed)
#endif

/* Slot i against its newest ticket. A row whose first page is issued again has lost it, or will: it becomes void, and
 * from then on it is as any row that is gone. A row whose pages nobody has followed yet waits. */
inline sync() {
  w = word[i];
  if :: at[i] && (PASSED(w) || !LIVE(w) || KEY1(w) != at[i]) -> evict(i) :: else fi;
  wait = BUSY(w) || KEY1(w) < newest1;
  if
  :: !at[i] && LIVE(w) && !PASSED(w) ->
     atomic { r_first1 = first1[i]; ok = word[i] == w };
     if
     :: !ok -> wait = 1
     :: IS_NEW -> wait = 1
     :: IS_OLD -> atomic { if :: word[i] == w -> word[i] = VOID(KEY1(w)) :: else -> wait = 1 fi }
     :: else -> adopt(i)
     fi
  :: else
  fi;
  pending[i] = wait;
  d_step { w = 0; wait = 0; ok = 0; r_first1 = 0 }
}

/* Page c is issued again. The row that begins there is gone: the pass over pending slots evicts it. */
inline follow_page() {
  p = c % PAGES;
  if
  :: owner1[p] ->
     i = owner1[p] - 1;
     if
     :: at[i] && run1[i] && PAGE(run1[i]) == p && run1[i] - 1 + PAGES <= c ->
        d_step { MUST(row_is_kept, page_head > run1[i] - 1 + PAGES) };
        pending[i] = 1;
        atomic { if :: LIVE(word[i]) && KEY1(word[i]) == at[i] -> word[i] = VOID(at[i]) :: else fi }
     :: else
     fi;
     owner1[p] = 0;
     i = 0
  :: else
  fi;
  p = 0
}

inline absorb() {
#if QUEUE
  fresh = 0;
#endif
  dirty = SLOTS;
#ifndef NOFOLLOW
  ONE_STEP {
    H = page_head; c = (H > PAGES && H - PAGES > followed -> H - PAGES : followed);
    do
    :: c < H -> follow_page(); c++
    :: else -> break
    od;
    followed = H
  };
#endif
  ROWS_STEP {
  ONE_STEP { H = head; c = (H > CAP && H - CAP > absorbed -> H - CAP : absorbed) };
  do
  :: c < H -> ONE_STEP { i = c % CAP; newest1 = c + 1; sync(); c++ }
  :: else -> break
  od;
  ONE_STEP { absorbed = H; i = 0 };
  do
  :: d_step { i < CAP && !pending[i] -> i++ }
  :: i < CAP && pending[i] -> ONE_STEP { newest1 = NEWEST1(i, H); sync(); i++ }
  :: i == CAP -> break
  od;
  dirty = CLEAN;
  forget()
  }
}

/* ---- recovery.h ---- */

#define TOUCHED(slot)  (at[slot] && (pending[slot] || NEWEST1(slot, H) > absorbed))

inline recover() {
  if
  :: dirty == SLOTS ->
     H = head; i = 0;
     do
     :: i < CAP ->
        w = word[i];
        if
        :: TOUCHED(i) && (!LIVE(w) || KEY1(w) != at[i]) -> evict(i)
        :: TOUCHED(i) && LIVE(w) && KEY1(w) == at[i] -> leaf[i] = 1
        :: else
        fi;
        i++
     :: else -> break
     od
  :: else
  fi;
  dirty = CLEAN;
  forget();
  owner_died = 0
}

inline lock(who) {
  atomic { mutex == 0 -> mutex = who };
  if :: owner_died -> recover() :: else fi
}

/* ---- Ids: ring_writer.h reclaim, participants.h ---- */

/* Whoever calls it holds byte `id`. */
inline reclaim(id) {
  g = in_flight[id];
  atomic {
    if :: g && word[SLOT(g)] == BUSYW(g, id) -> word[SLOT(g)] = VOID(g) :: else fi;
    g = 0
  };
  in_flight[id] = 0;
#ifndef NORECLAIM
  do
  :: run1_of[id] && g < size_of[id] ->
     atomic {
       if :: page_word[PAGE(run1_of[id] + g)] == BUSYW(run1_of[id] + g, id) -> page_word[PAGE(run1_of[id] + g)] = VOID(run1_of[id] + g)
       :: else
       fi;
       g++
     }
  :: else -> break
  od;
#endif
#ifndef ORPHAN
  run1_of[id] = 0;
#endif
  g = 0
}

inline census(who) {
  id = 1;
  do
  :: id <= IDS ->
     if
     :: atomic { joined[id] && !holder[id] -> holder[id] = who };
        reclaim(id);
        joined[id] = 0;
        holder[id] = 0
     :: else
     fi;
     id++
  :: else -> break
  od;
  id = 0
}

/* ---- Those who take part ---- */

#if QUEUE
#define SLOT_IS_THERE       (head < ticket_limit)
#define REST(woken)         atomic { sleeps[me] = 1; quiet++ }; atomic { (woken) || over -> sleeps[me] = 0; quiet-- }
#else
#define SLOT_IS_THERE       1
#endif

/* Nobody overwrites a page, in a queue, of a row that is still to be delivered. */
inline check_taken(q) {
#if QUEUE
  d_step { MUST(needed_row_stays, !LIVE(page_word[q]) || !written[page[q]] || delivered[page[q]]) }
#else
  skip
#endif
}
inline check_slot_taken(s) {
#if QUEUE
  d_step { MUST(needed_row_stays, !LIVE(word[s]) || delivered[row[s]]) }
#else
  skip
#endif
}
#if QUEUE
#define row_is_written()  written[me * 4 + n] = 1; fresh = 1
#else
#define row_is_written()  skip
#endif
/* The row that is written now has all its pages. */
inline check_written() {
#if QUEUE
  d_step {
    t = 0;
    do :: t < size -> MUST(needed_row_stays, page_word[PAGE(f1 + t)] == DONE(f1 + t, id)); t++ :: else -> break od;
    t = 0
  }
#else
  skip
#endif
}

/* Ends with a run whose pages are all busy and this writer's own, or with f1 = 0: no tickets are left. */
inline take_run() {
  do
  :: f1 == 0 ->
     /* Says what it takes before it takes it: no ticket is one that nobody speaks of. */
     atomic {
       seen = page_head;
       h = START(page_head, size);
#if !defined(WAITBUSY) && !defined(STEAL)
       do
       :: h + size <= MAXP && MEETS_BUSY(h, size) -> h = START(h + 1, size)
       :: else -> break
       od;
#endif
       if
       :: h + size > MAXP -> break
#if QUEUE
       :: h + size <= MAXP && h + size > page_limit -> h = NO
#endif
       :: else ->
#ifndef SAYLATE
          run1_of[id] = h + 1; size_of[id] = size
#endif
       fi
     };
#if QUEUE
     if :: h == NO -> REST(ROOM_FROM(page_head) || ROOM_FROM(page_head + 1) || ROOM_FROM(page_head + 2) || ROOM_FROM(page_head + 3)); if :: over -> break :: else fi :: else fi;
#endif
     atomic { if :: h != NO && page_head == seen -> page_head = h + size; f1 = h + 1 :: else fi; h = 0; seen = 0 };
#ifdef SAYLATE
     if :: f1 -> atomic { run1_of[id] = f1; size_of[id] = size } :: else fi
#endif
  :: atomic {
     f1 && t < size ->
     if
     :: BUSY(page_word[PAGE(f1 + t)]) || KEY1(page_word[PAGE(f1 + t)]) >= f1 + t ->
#if defined(WAITBUSY)
        !BUSY(page_word[PAGE(f1 + t)])
#elif defined(STEAL)
        page_word[PAGE(f1 + t)] = VOID(KEY1(page_word[PAGE(f1 + t)]))
#else
        given_up = 1
#endif
     :: else -> check_taken(PAGE(f1 + t)); page_word[PAGE(f1 + t)] = BUSYW(f1 + t, id); t++
     fi
     };
     /* Void: the pages that it has go back. */
     do
     :: atomic {
        given_up && t > 0 ->
        t--;
#ifndef KEEPBUSY
        if :: page_word[PAGE(f1 + t)] == BUSYW(f1 + t, id) -> page_word[PAGE(f1 + t)] = VOID(f1 + t) :: else fi
#endif
        }
     :: atomic { given_up && t == 0 -> given_up = 0; f1 = 0; break }
     :: !given_up -> break
     od
  :: f1 && t == size -> t = 0; break
  od
}

inline fill_run() {
  do :: t < size -> atomic { page[PAGE(f1 + t)] = me * 4 + n; t++ } :: else -> break od;
  t = 0;
  do
  :: t < size ->
     atomic {
       if :: page_word[PAGE(f1 + t)] == BUSYW(f1 + t, id) -> page_word[PAGE(f1 + t)] = DONE(f1 + t, id) :: else -> lost = 1 fi;
       t++
     }
  :: else -> break
  od;
  t = 0
}

/* Ends with a slot that is busy and its own, or with g = 0: no tickets are left. */
inline take_slot() {
  do
  :: g == 0 ->
     if
     :: head == MAXT -> break
#if QUEUE
     :: head < MAXT && !SLOT_IS_THERE -> REST(SLOT_IS_THERE); if :: over -> break :: else fi
#endif
     :: atomic { head < MAXT && SLOT_IS_THERE -> head++; g = head };
#ifdef WKILL
        in_flight[id] = g;
#endif
        /* Load and CAS in one step: a CAS that fails is a hole, too. */
        atomic {
          if
          :: BUSY(word[SLOT(g)]) || KEY1(word[SLOT(g)]) >= g -> g = 0
          :: else -> check_slot_taken(SLOT(g)); word[SLOT(g)] = BUSYW(g, id); row[SLOT(g)] = me * 4 + n; first1[SLOT(g)] = f1;
             NOTE_CONTENT(g, me * 4 + n)
          fi
        }
     fi
  :: g -> break
  od
}

inline commit_row() {
  atomic {
    check_written();
    if :: word[SLOT(g)] == BUSYW(g, id) -> word[SLOT(g)] = DONE(g, id); row_is_written() :: else -> lost = 1 fi;
    g = 0
  }
}

proctype Writer(byte me; byte id; byte rows) {
  byte g, h, seen, n, f1, t, size;
  bit lost, given_up;
  {
#ifdef WKILL
    if
    :: !id ->                                            /* all ids are taken: waits for one */
       if
       :: atomic { !holder[1] -> holder[1] = me; id = 1 }
       :: atomic { holder[1] && !holder[2] -> holder[2] = me; id = 2 }
       fi;
       reclaim(id);
       joined[id] = 1
    :: else
    fi;
#endif
    do
    :: n < rows && !lost ->
       atomic { size = SIZE(me * 4 + n); f1 = 0; t = 0 };
       if :: size -> take_run(); if :: !f1 -> break :: else fi :: else fi;
#ifdef ROWFIRST
       take_slot();
       if :: g -> commit_row(); fill_run() :: else -> break fi;
#else
       fill_run();
       if :: lost -> break :: else fi;
       take_slot();
       if :: g -> commit_row() :: else -> break fi;
#endif
       atomic { run1_of[id] = 0; size_of[id] = 0; n++; f1 = 0; size = 0 }
    :: else -> break
    od;
    /* Nobody leaves with busy pages, unless it is killed. */
    atomic { run1_of[id] = 0; size_of[id] = 0; joined[id] = 0; holder[id] = 0;
#ifdef GOON
             MUST(writers_go_on, n == rows);
#endif
             g = 0; n = 0; f1 = 0; t = 0; size = 0; h = 0; seen = 0; given_up = 0; lost = 0 }
  } unless {
    atomic {
      KILLED(me) || STOPPED(me);
      if :: KILLED(me) && id && holder[id] == me -> holder[id] = 0 :: else fi;
#if QUEUE
      if :: sleeps[me] -> sleeps[me] = 0; quiet-- :: else fi;
#endif
      g = 0; n = 0; f1 = 0; t = 0; size = 0; h = 0; seen = 0; given_up = 0; lost = 0
    }
  };
  finished++
#if QUEUE
  ; quiet++
#endif
}

/* row_gather.h. No lock: the row's word before and after; the words of its pages after. They were done before the row's. */
inline copy_row() {
  atomic { w = word[s]; ok = LIVE(w) && KEY1(w) == key1; content = row[s]; r_first1 = first1[s] };
  c = 0;
  do
  :: ok && c < SIZE(content) -> copied = page[PAGE(r_first1 + c)]; torn = torn || copied != content; c++
  :: else -> break
  od;
  c = 0;                                                 /* SPIN lets no loop end where a d_step begins */
  d_step {
#ifndef NOLOOK
    do
    :: ok && c < SIZE(content) -> p = page_word[PAGE(r_first1 + c)]; ok = LIVE(p) && KEY1(p) == r_first1 + c; c++
    :: else -> break
    od;
    p = 0;
#endif
    ok = ok && word[s] == w;
    if
    :: ok -> MUST(copy_is_whole, !torn); MUST(copy_is_the_row_drawn, content == drawn)
    :: else
    fi
  }
}

#define ANY_LEAF  (leaf[0] || leaf[1] || leaf[CAP - 1])

#if !QUEUE
proctype Learner(byte me; byte rounds) {
  ABSORBER;
  byte s, key1, content, copied, drawn;
  bit torn, failed;
  {
    lock(me);
    absorb();
    do
    :: rounds > 0 ->
       rounds--;
       atomic {                                          /* draw: any item with a leaf */
         c = 0;
         do :: s < CAP -> c = c + leaf[s]; s++ :: else -> break od;
         s = 0;
         do
         :: s < CAP && leaf[s] -> key1 = at[s]; drawn = content_of[at[s]]; break
         :: s < CAP && !(leaf[s] && c == 1) -> c = c - leaf[s]; s++
         :: s == CAP -> s = 0; break
         od;
         c = 0;
         mutex = 0
       };
       if
       :: key1 ->
          copy_row();
          failed = !ok;
          forget();
          lock(me);
          absorb();
          d_step {
            MUST(failed_draw_is_gone, !failed || at[s] != key1 || !leaf[s]);
            s = 0; key1 = 0; content = 0; copied = 0; drawn = 0; torn = 0; failed = 0
          }
       :: else -> lock(me); absorb()
       fi
    :: else -> break
    od;
    mutex = 0
  } unless {
    atomic {
      KILLED(me) ->
      if :: mutex == me -> mutex = 0; owner_died = 1 :: else fi;
      rounds = 0; s = 0; key1 = 0; content = 0; copied = 0; drawn = 0; torn = 0; failed = 0;
      forget()
    }
  };
  finished++
}
#endif

#if QUEUE
/* ---- queue_room.h ---- */

#define NEEDED(s)  (leaf[s] || held[s])

/* ok = 1: a row that has ticket needed_from, if there is one, is needed, or may come. */
inline judge_need() {
  d_step {
    i = needed_from % CAP; newest1 = needed_from + 1; w = word[i];
    if
    :: at[i] == newest1 -> ok = NEEDED(i)
    :: at[i] > newest1 -> ok = 0
    :: at[i] < newest1 && KEY1(w) > newest1 -> ok = 0
    :: at[i] < newest1 && KEY1(w) == newest1 -> ok = BUSY(w) || LIVE(w)
    :: at[i] < newest1 && KEY1(w) < newest1 -> ok = !hard || BUSY(w); if :: !ok -> word[i] = VOID(newest1) :: else fi
    fi;
    i = 0; newest1 = 0; w = 0
  }
}

inline look_at_runs() {
  d_step {
    bound = page_head;
    if :: run1_of[1] && run1_of[1] - 1 < bound -> bound = run1_of[1] - 1 :: else fi;
    if :: run1_of[2] && run1_of[2] - 1 < bound -> bound = run1_of[2] - 1 :: else fi
  }
}

/* First who has a run in flight, then what was written. A page below belongs to a row that is absorbed, or to none. */
inline advance() {
#ifdef LOOKLATE
  absorb();
  look_at_runs();
#else
  look_at_runs();
  absorb();
#endif
  atomic {
  do
  :: needed_from < absorbed -> judge_need(); if :: ok -> ok = 0; break :: else -> needed_from++ fi
  :: else -> break
  od;
  do
  :: page_needed_from < bound && page_needed_from < followed ->
     d_step {
       p = owner1[page_needed_from % PAGES];
       ok = (p -> at[p - 1] && run1[p - 1] == page_needed_from + 1 && NEEDED(p - 1) : 0);
       p = 0
     };
#ifdef NOPAGELIMIT
     ok = 0;
#endif
     if :: ok -> ok = 0; break :: else -> page_needed_from++ fi
  :: else -> break
  od;
  ticket_limit = needed_from + CAP;
  page_limit = page_needed_from + PAGES;
  bound = 0
  }
}

proctype Learner(byte me; byte rounds) {
  ABSORBER;
  byte s, key1, content, copied, drawn, bound;
  bit torn, hard;
  do
  :: lock(me);
     if
     :: key1 -> d_step { held[s] = 0; delivered[drawn] = 1; key1 = 0; s = 0; drawn = 0 }
     :: else
     fi;
     advance();
     d_step {                                            /* the oldest one */
       c = 0; s = 0;
       do
       :: c < CAP -> if :: leaf[c] && (!key1 || at[c] < key1) -> key1 = at[c]; s = c :: else fi; c++
       :: else -> break
       od;
       if :: key1 -> drawn = row[s]; held[s] = 1; leaf[s] = 0 :: else fi;
       c = 0; mutex = 0
     };
     if
     :: key1 ->                                          /* for some time; that no page is taken the writers check */
        atomic { copy_row(); MUST(needed_row_stays, ok); forget(); content = 0; copied = 0 }
     :: else -> REST(ANY_LEAF || fresh); if :: over -> break :: else fi
     fi
  od;
  finished++
  ; quiet++
}
#endif

proctype Judge(byte others) {
  ABSORBER;
  byte g, id;
#if QUEUE
  byte bound, before;
  bit hard = 1;
  do
  :: over -> break
  :: atomic {
       !over && quiet == others ->
       census(JUDGE);
       lock(JUDGE);
       advance();
       mutex = 0;
       if
       :: ANY_LEAF || fresh
       :: else -> if :: before == ticket_limit + page_limit -> over = 1 :: else -> before = ticket_limit + page_limit fi
       fi;
       forget()
     }
  od;
#endif
  finished == others;
  census(JUDGE);
  lock(JUDGE);
#if QUEUE
  advance();
#else
  absorb();
#endif
  d_step {
    i = 0;
    do
    :: i < PAGES ->                                      /* every page can be taken again */
       MUST(no_page_stays_busy, !BUSY(page_word[i]) || holder[ID(page_word[i])]);
       i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < CAP ->
       w = word[i];
       MUST(no_slot_stays_busy, !BUSY(w) || holder[ID(w)]);
       MUST(pending_is_a_lost_ticket, pending[i] == (BUSY(w) || KEY1(w) < NEWEST1(i, head)));
       if
       :: LIVE(w) && !(QUEUE && KEY1(w) < NEWEST1(i, head)) ->
          MUST(every_row_is_absorbed, at[i] == KEY1(w));
#if !QUEUE
          MUST(every_row_is_absorbed, leaf[i]);
#endif
          c = 0;
          do
          :: c < SIZE(row[i]) && leaf[i] ->
             MUST(drawable_has_its_pages, LIVE(page_word[PAGE(first1[i] + c)]) && KEY1(page_word[PAGE(first1[i] + c)]) == first1[i] + c);
             MUST(drawable_has_its_pages, page[PAGE(first1[i] + c)] == row[i]);
             c++
          :: else -> break
          od
       :: else -> MUST(every_row_is_absorbed, !at[i] && !leaf[i])
       fi;
       i++
    :: else -> break
    od;
#if QUEUE
    i = 4;
    do
    :: i < 16 -> MUST(every_row_is_delivered, written[i] == delivered[i]); i++
    :: else -> break
    od;
    MUST(no_room_is_lost, STOP || (needed_from == head && page_needed_from == page_head));
#endif
    i = 0; c = 0; w = 0
  };
  mutex = 0
}

init {
  atomic {
    run Judge((ROWS1 > 0) + (ROWS2 > 0) + (ROWS3 > 0) + (ROUNDS > 0));
    if :: ROWS1 > 0 -> holder[1] = 1; joined[1] = 1; run Writer(1, 1, ROWS1) :: else fi;
    if :: ROWS2 > 0 -> holder[2] = 2; joined[2] = 1; run Writer(2, 2, ROWS2) :: else fi;
    if :: ROWS3 > 0 -> run Writer(3, 0, ROWS3) :: else fi;
    if :: ROUNDS > 0 -> run Learner(4, ROUNDS) :: else fi
  };
#ifdef K
  killed = 1 << K;
#endif
#if STOP
  stopped = 1 << STOP
#endif
}
