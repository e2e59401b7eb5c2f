/* The queue (cpp/absorb/claims.h, queue_room.h, absorber.h; cpp/session/recovery.h; cpp/write/ring_writer.h): writers that wait
 * for room, learners that take items, copy them and commit or release them, deaths at any step, and a judge once all is quiet.
 * README.md says what is left out, and test_protocol_model.py how it is run.
 *
 * A row's content names it: writer * 4 + number, of four at the most. An item is a row (SPAN 0), or a row and the next one of its stream (SPAN 1).
 *
 *   CAP MAXT       slots; tickets issued before writers stop
 *   ROWS1..3       rows of each writer. FIRSTS1..3, ENDS1..3: bit n is set where row n starts, or ends, an episode
 *   LEARNERS       1 or 2, each takes up to BATCH items at a time. MAXDRAWS: how often an item is handed out
 *   RELEASES       batches that are given back instead of committed. POLLS: looks that nothing has called for, of each
 *   STAY           writers stay when they have written all; else they go, or stay
 *   STOPS          writer 1 may be stopped while it writes a row, and goes on when all is over
 *   STARVED        rows of items that are to be drawn are kept, too
 *   LAZY           learners do not look for the dead each time
 *   WKILL          writers may be killed between any two steps. Writer 3 takes the first id that becomes free
 *   LKILL          whoever has the mutex may be killed between any two stores
 *   K K2           who is killed, at any moment (writers 1-3, learners 4 and 5); K2 after K
 * and every naive variant is a flag by itself.
 */
#define NO     255
#ifndef NOKEEP
#define KEEPS  1
#else
#define KEEPS  0
#endif
#define IDS    2
#define JUDGE  6
#define CLEAN  0
#define TREE   1
#define SLOTS  2
#define FIRST  1
#define END    2

#define SLOT(key1)       (((key1) - 1) % CAP)
#define BUSYW(key1, id)  ((key1) << 4 | (id) << 1 | 1)
#define DONE(key1, id)   ((key1) << 4 | (id) << 1)
#define VOID(key1)       ((key1) << 4)
#define BUSY(w)          ((w) & 1)
#define ID(w)            ((w) >> 1 & 7)
#define LIVE(w)          (!BUSY(w) && ID(w))
#define KEY1(w)          ((w) >> 4)                      /* key + 1; 0: never written */
#define NEWEST1(s, h)    ((s) < (h) -> (h) - ((h) - 1 - (s)) % CAP : 0)

/* A claim: one word, so each change is one store. */
#define MOST             3                               /* draws of an item that lacks a row */
#define DRAWS(c)         ((c) & 3)
#define WROTE(c)         ((c) >> 2 & 3)
#define CLOSED(c)        ((c) & 16)
#define HOLDER(c)        ((c) >> 5)                      /* learner's number less 3; 0: nobody */
#define UNTOUCHED(c)     (!HOLDER(c) && !DRAWS(c))
#define LATER(a, b)      ((a) > (b) -> (a) : (b))
#define STANDS(s)        LATER(place[s], KEY1(word[s]))  /* the ticket + 1 that the row there, or under way there, stands for */
#define PRESENCE(who)    ((who) - 3)

/* The writers' scripts, by content. */
#define NUMBER(c)     ((c) % 4)
#define WRITER(c)     ((c) / 4)
#define IS_FIRST(c)   ((WRITER(c) == 1 -> FIRSTS1 : (WRITER(c) == 2 -> FIRSTS2 : FIRSTS3)) >> NUMBER(c) & 1)
#define IS_END(c)     ((WRITER(c) == 1 -> ENDS1 : (WRITER(c) == 2 -> ENDS2 : ENDS3)) >> NUMBER(c) & 1)

/* What is under the mutex alone is one step, unless its holder may be killed in between. */
#ifdef LKILL
#define ONE_STEP
#else
#define ONE_STEP atomic
#endif

/* A verdict has a name: it is what the verifier prints. */
#define MUST(verdict, condition) verdict = (condition); assert(verdict)
hidden byte copy_is_the_item, nobody_else_has_it, not_handed_out_again, what_is_held_stays, needed_row_stays;
hidden byte no_slot_stays_busy, nothing_is_held, writers_go_on, every_item_is_delivered, no_room_is_lost, item_is_not_dropped, commit_is_whole;

/* The ring. */
byte head, ticket_limit = CAP;
byte word[CAP], row[CAP];                                /* a row's content is there while its word is not busy */
#if SPAN
byte prev_key1[CAP], flags[CAP];
#endif

/* Those who take part: byte locks (0: free), since when they have them, the ticket in flight. */
byte holder[IDS + 1], in_flight[IDS + 1], since[IDS + 1];
bit joined[IDS + 1];

/* Under the mutex. */
byte mutex, absorbed, needed_from, dirty;
byte at[CAP], claim[CAP];
#if SPAN
byte prev[CAP], next[CAP];
#endif
byte place[CAP];                                         /* the ticket + 1 of a later turn that a row was kept for; older than the row: none */
bit leaf[CAP], pending[CAP], owner_died;
bit ending[CAP];                                         /* of the claim's word: its holder is done with it, if it is the ender */
byte ender;                                              /* presence of who is done with what it has marked; 0: nobody */

/* Who sleeps, and what wakes them: a row was committed. */
byte quiet, releases = RELEASES;
bit fresh, over;
byte sleeps[8];                                          /* until there is ROOM, until it is OVER, or for ITEMS or an ID */
#define ROOM   1
#define OVER   2
#define ITEMS  3
#define AN_ID  4
#define STOPPED 5

/* Ghosts, and the end. */
byte killed, gone, commits[17], owner[17];               /* by content */
bit written[17];
byte pair[2], had[2];                                    /* what a commit of two has begun with, and how often each was committed before */
#define KILLED(who)  (killed >> (who) & 1)
#define GONE(who)    (gone >> (who) & 1)

/* ---- Under the mutex: variables of whoever holds it ---- */

#define ABSORBER \
  byte H, c, i, newest1, w, b, k, p; \
  byte since_then[IDS + 1]; \
  bit wait, adopted, deferred, ok, hard

inline forget() {
  d_step { H = 0; c = 0; i = 0; newest1 = 0; w = 0; b = 0; k = 0; p = 0; wait = 0; adopted = 0; deferred = 0; ok = 0; hard = 0;
           since_then[1] = 0; since_then[2] = 0 }
}

/* absorber.h. The item anchored there lacks a row: nobody gets it any more. */
inline retire(anchor) {
  d_step {
    MUST(item_is_not_dropped, !at[anchor] || !(leaf[anchor] || HOLDER(claim[anchor])));
    claim[anchor] = claim[anchor] | MOST
  };
  leaf[anchor] = 0
}

inline evict(slot) {
  retire(slot);
#if SPAN
  if :: prev[slot] != NO -> retire(prev[slot]) :: else fi;
  if :: prev[slot] != NO -> claim[prev[slot]] = claim[prev[slot]] | 16; next[prev[slot]] = NO :: else fi;
  if :: next[slot] != NO -> prev[next[slot]] = NO :: else fi;
  atomic { prev[slot] = NO; next[slot] = NO };
#endif
#ifdef CLAIMFIRST
  claim[slot] = 0;
#endif
  at[slot] = 0;
  d_step { claim[slot] = 0; ending[slot] = 0 }
}

inline complete(anchor) {
  if :: UNTOUCHED(claim[anchor]) -> leaf[anchor] = 1 :: else fi
}

/* streams.h, and what the row in the slot makes complete. `b` is the slot of the row before, or NO. */
inline connect(slot) {
#if SPAN
  if
  :: b == NO
  :: b != NO && flags[slot] & FIRST -> claim[b] = claim[b] | 16
  :: b != NO && !(flags[slot] & FIRST) ->
     if :: next[b] == NO -> prev[slot] = b; next[b] = slot :: else fi;
     if :: prev[slot] == b -> complete(b) :: else fi
  fi
#else
  complete(slot)
#endif
}

/* Sets `b`. ok = 0: the row before is there, but not absorbed. */
inline find_predecessor(slot) {
  d_step {
    b = NO; ok = 1;
#if SPAN
    if
#ifdef NODEFERFIRST
    :: prev_key1[slot] && (!(flags[slot] & FIRST) || at[SLOT(prev_key1[slot])] == prev_key1[slot]) ->
#else
    :: prev_key1[slot] ->
#endif
       p = word[SLOT(prev_key1[slot])];
       if
       :: !LIVE(p) || KEY1(p) != prev_key1[slot]
       :: else -> b = SLOT(prev_key1[slot]); if :: at[b] != prev_key1[slot] -> ok = 0; b = NO :: else fi
       fi;
       p = 0
    :: else
    fi
#endif
  }
}

/* Slot i against its newest ticket. The order is by key: an older row may not stay. */
inline sync() {
  w = word[i];
  if :: at[i] && (LATER(place[i], KEY1(w)) < newest1 || !LIVE(w) || KEY1(w) != at[i]) -> evict(i) :: else fi;
  wait = BUSY(w) || LATER(place[i], KEY1(w)) < newest1;
  if
  :: !at[i] && LIVE(w) && !wait ->
     find_predecessor(i);
     if
     :: !ok -> wait = 1; deferred = 1
     :: else ->
        claim[i] = ID(w) << 2;
        at[i] = KEY1(w);
        adopted = 1;
        connect(i)
     fi
  :: else
  fi;
  pending[i] = wait;
  atomic { w = 0; b = 0; wait = 0; ok = 0 }
}

inline absorb() {
  atomic {
    H = head; fresh = 0;
    d_step { i = 0; do :: i < CAP && !pending[i] -> i++ :: else -> break od };
    if
    :: absorbed < H || i < CAP -> dirty = SLOTS; c = (H > CAP && H - CAP > absorbed -> H - CAP : absorbed)
    :: else -> c = NO
    fi;
    i = 0
  };
  if
  :: c != NO ->
     do
     :: c < H -> ONE_STEP { i = c % CAP; newest1 = c + 1; sync(); c++ }
     :: else -> break
     od;
     atomic { absorbed = H; adopted = 0; deferred = 0; i = 0 };
     do
     :: d_step { i < CAP && !pending[i] -> i++ }
     :: i < CAP && pending[i] -> ONE_STEP { newest1 = NEWEST1(i, H); sync(); i++ }
     :: atomic { i == CAP && adopted && deferred -> adopted = 0; deferred = 0; i = 0 }
     :: i == CAP && !(adopted && deferred) -> break
     od;
     dirty = CLEAN
  :: else
  fi;
  d_step { H = 0; c = 0; i = 0; newest1 = 0; adopted = 0; deferred = 0 }
}

/* ---- queue_room.h ---- */

/* Whether the stream may go on after its last row. */
#define GOES_ON(s)     (!CLOSED(claim[s]) && (!hard || at[s] > since_then[WROTE(claim[s])]))
#if SPAN
#define UNFINISHED(s)  (UNTOUCHED(claim[s]) && !leaf[s] && !(flags[s] & END) && next[s] == NO && GOES_ON(s))
#else
#define UNFINISHED(s)  0
#endif
#define TO_COME(s)     (leaf[s] || HOLDER(claim[s]))
#if defined(NOWALK) || !SPAN
#define NEEDED(s)      (TO_COME(s) || UNFINISHED(s))
#else
#define NEEDED(s)      (TO_COME(s) || UNFINISHED(s) || (prev[s] != NO && TO_COME(prev[s])))
#endif

/* Nobody can say when a row like this is done with: its stream may go on, or somebody has its item. */
#ifdef STARVED
#define WAITS_LONG(s)  1
#elif SPAN
#define WAITS_LONG(s)  (UNFINISHED(s) || HOLDER(claim[s]) || (prev[s] != NO && HOLDER(claim[prev[s]])))
#else
#define WAITS_LONG(s)  HOLDER(claim[s])
#endif

/* ok = 1: after the rows at needed_from that wait long comes one that is not needed, in the same turn. */
inline find_room() {
  d_step {
    ok = 0; k = needed_from;
    do
    :: k < absorbed && k < needed_from + CAP ->
       i = k % CAP;
       if
       :: at[i] && STANDS(i) == k + 1 && NEEDED(i) && WAITS_LONG(i) -> k++
       :: at[i] && STANDS(i) == k + 1 && NEEDED(i) && !WAITS_LONG(i) -> break
#ifdef NOBUSY
       :: !at[i] && (BUSY(word[i]) || LIVE(word[i])) && STANDS(i) == k + 1 -> break
#else
       :: !at[i] && (BUSY(word[i]) || LIVE(word[i])) && STANDS(i) == k + 1 -> k++
#endif
       :: else -> ok = (k > needed_from); break
       fi
    :: else -> break
    od;
    k = 0; i = 0
  }
}

/* ok = 1: a row that stands for ticket needed_from, if there is one, is needed, or may come. */
inline judge_need() {
  atomic {
    i = needed_from % CAP; newest1 = needed_from + 1;
    w = word[i];
    if
    :: at[i] && STANDS(i) == newest1 -> ok = NEEDED(i)
    :: at[i] && STANDS(i) > newest1 -> ok = 0
    :: !at[i] && (BUSY(w) || LIVE(w)) && STANDS(i) >= newest1 -> ok = (STANDS(i) == newest1)
    :: else ->
       if
       :: KEY1(w) > newest1 -> ok = 0
       :: KEY1(w) == newest1 -> ok = BUSY(w) || LIVE(w)
       :: KEY1(w) < newest1 ->
#ifdef PASSBY
          ok = !hard
#else
          ok = !hard || BUSY(w);
          if :: !ok -> word[i] = VOID(newest1) :: else fi
#endif
       fi
    fi;
    i = 0; newest1 = 0; w = 0
  }
}

#define ROOM_IS_WANTED  (sleeps[1] == ROOM || sleeps[2] == ROOM || sleeps[3] == ROOM || me < 4)

/* The row at needed_from may get its item, and stands for the next ticket of its slot, which is the next one there is. */
inline keep() {
  ONE_STEP {
#ifdef HEADFIRST
    head++;
    place[needed_from % CAP] = needed_from + 1 + CAP;
#else
    place[needed_from % CAP] = needed_from + 1 + CAP;
    head++;
#endif
    needed_from++
  }
}

/* Where writers have no room it looks harder: for writers that died, and tickets that nobody has begun to write. Rows
 * that the dead committed are absorbed once it is known that they are dead. */
inline advance() {
  ONE_STEP { hard = (head >= ticket_limit || me == JUDGE) };
  if
  :: hard ->
     d_step {
       since_then[1] = (holder[1] -> since[1] : NO);
       since_then[2] = (holder[2] -> since[2] : NO)
     };
#ifdef NOSINCE
     d_step { k = 1; do :: k <= IDS -> if :: holder[k] -> since_then[k] = 0 :: else fi; k++ :: else -> break od; k = 0 };
#endif
#if SPAN && !defined(DEADLATE)
     absorb()
#endif
  :: else
  fi;
  do
  :: needed_from < absorbed ->
     judge_need();
     if
     :: ok ->
        ok = 0;
#if KEEPS
        if :: hard && head == needed_from + CAP && head < MAXT && ROOM_IS_WANTED -> find_room() :: else fi;
        if :: ok -> ok = 0; keep() :: else -> break fi
#else
        break
#endif
     :: else -> needed_from++
     fi
  :: else -> break
  od;
  ONE_STEP { ticket_limit = needed_from + CAP; hard = 0 };
  atomic { since_then[1] = 0; since_then[2] = 0 }
}

/* ---- claims.h ---- */

/* Of a dead learner: its items are in their places again. */
inline give_back_of(who) {
  ONE_STEP {
    dirty = TREE;
    i = 0;
    do
    :: i < CAP ->
       if
       :: at[i] && HOLDER(claim[i]) == PRESENCE(who) ->
#ifdef FORGETDRAWS
          leaf[i] = 1;
          claim[i] = claim[i] & 28
#else
          if :: DRAWS(claim[i]) < MAXDRAWS -> leaf[i] = 1 :: else fi;
          claim[i] = claim[i] & 31
#endif
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0;
    dirty = CLEAN
  }
}

#ifdef LEASE
#define IS_OVER(who)  (who != me)                        /* it has had its items for long enough */
#else
#define IS_OVER(who)  GONE(who)
#endif

inline give_back() {
  if :: IS_OVER(4) -> give_back_of(4) :: else fi;
#if LEARNERS > 1
  if :: IS_OVER(5) -> give_back_of(5) :: else fi
#endif
}

/* ---- recovery.h ---- */

/* A slot that the absorption may have been at. */
#define TOUCHED(slot)  (at[slot] && (pending[slot] || NEWEST1(slot, H) > absorbed))

inline finish_evict(slot) {
  w = word[slot];
  if :: !LIVE(w) || KEY1(w) != at[slot] -> evict(slot) :: else fi;
  w = 0
}

inline finish_connect(slot) {
#if SPAN
  if :: prev[slot] != NO && next[prev[slot]] != slot -> prev[slot] = NO :: else fi;
#endif
  w = word[slot];
  if :: LIVE(w) && KEY1(w) == at[slot] -> find_predecessor(slot); connect(slot) :: else fi;
  atomic { w = 0; b = 0; ok = 0 }
}

/* claims.h. Whoever died while it let items go is done with all of them; before that, with none. */
inline finish_ending() {
  do
  :: i < CAP ->
     if
     :: ending[i] && ender && HOLDER(claim[i]) == ender ->
        if :: DRAWS(claim[i]) + 1 < MAXDRAWS -> leaf[i] = 1 :: else fi;
        d_step { claim[i] = (claim[i] & 31) + 1; ending[i] = 0; commits[row[i]]++; owner[row[i]] = 0 }
     :: ending[i] && !(ender && HOLDER(claim[i]) == ender) -> ending[i] = 0
     :: else
     fi;
     i++
  :: else -> break
  od;
  ender = 0;
  d_step {
    MUST(commit_is_whole, !pair[0] || commits[pair[0]] - had[0] == commits[pair[1]] - had[1]);
    pair[0] = 0; pair[1] = 0; had[0] = 0; had[1] = 0
  }
}

inline recover() {
#if KEEPS
  i = 0;
  do
  :: i < CAP -> d_step { if :: place[i] > head -> place[i] = place[i] - CAP :: else fi; i++ }
  :: else -> break
  od;
#endif
  if
  :: dirty == SLOTS ->
     H = head; i = 0;
     do
     :: i < CAP -> ONE_STEP { if :: TOUCHED(i) -> finish_evict(i) :: else fi; i++ }
     :: else -> break
     od;
     i = 0;
     do
     :: i < CAP -> ONE_STEP { if :: TOUCHED(i) -> finish_connect(i) :: else fi; i++ }
     :: else -> break
     od
  :: else
  fi;
  i = 0;
  finish_ending();
  i = 0;
  do
  :: i < CAP ->
     d_step {
       if :: !at[i] -> claim[i] = 0 :: else fi;
       if :: HOLDER(claim[i]) || DRAWS(claim[i]) >= MAXDRAWS -> leaf[i] = 0 :: else fi;
       i++
     }
  :: else -> break
  od;
  dirty = CLEAN;
  forget();
  owner_died = 0
}

inline lock(who) {
  atomic { mutex == 0 -> mutex = who };
  if :: owner_died -> recover() :: else fi
}

/* ---- Ids: ring_writer.h reclaim, participants.h ---- */

inline reclaim(id) {
  g = in_flight[id];
  atomic {
    if :: g && word[SLOT(g)] == BUSYW(g, id) -> word[SLOT(g)] = VOID(g) :: else fi;
    g = 0
  };
  in_flight[id] = 0
}

inline census(who) {
  id = 1;
  do
  :: id <= IDS ->
     if
     :: atomic { joined[id] && !holder[id] -> holder[id] = who };
        reclaim(id);
        atomic { joined[id] = 0; holder[id] = 0 }
     :: else
     fi;
     id++
  :: else -> break
  od;
  id = 0
}

/* ---- Those who take part ---- */

/* Nothing to do until `woken`. */
inline rest(what, woken) {
  atomic { sleeps[me] = what; quiet++ };
  atomic { (woken) -> sleeps[me] = 0; quiet-- }
}

/* A row that is overwritten: its item was done, or there is none and will be none. */
inline check_overwritten(slot) {
  d_step {
    k = row[slot];
#if SPAN
    if
    :: LIVE(word[slot]) && !IS_END(k) && NUMBER(k) < 3 && written[k + 1] && !IS_FIRST(k + 1) ->
       MUST(needed_row_stays, commits[k] == MAXDRAWS)
    :: else
    fi;
#else
    if :: LIVE(word[slot]) -> MUST(needed_row_stays, commits[k] == MAXDRAWS) :: else fi;
#endif
    k = 0
  }
}

proctype Writer(byte me; byte id; byte rows) {
  ABSORBER;
  byte g, n, last1, polls = POLLS;
  {
#ifdef WKILL
    if
    :: !id ->                                            /* all ids are taken: waits for one */
       rest(AN_ID, !holder[1] || !holder[2]);
       if
       :: atomic { !holder[1] -> holder[1] = me; id = 1 }
       :: atomic { holder[1] && !holder[2] -> holder[2] = me; id = 2 }
       fi;
       reclaim(id);
       atomic { since[id] = head; joined[id] = 1 }
    :: else
    fi;
#endif
    do
    :: n == rows || head == MAXT -> break
    :: n < rows && head < MAXT && polls > 0 && head >= ticket_limit ->
       polls--;
       lock(me);
       absorb();
       advance();
       atomic { mutex = 0; forget() }
#ifdef FETCHADD
    :: n < rows && head < MAXT && head < ticket_limit ->
       atomic { if :: head < MAXT -> head++; g = head :: else fi };
#else
    :: atomic { n < rows && head < MAXT && head < ticket_limit -> head++; g = head };
#endif
#ifdef WKILL
       in_flight[id] = g;
#endif
       /* Load and CAS in one step: a CAS that fails is a hole, too. */
       atomic {
         if
         :: !g || BUSY(word[SLOT(g)]) || KEY1(word[SLOT(g)]) >= g -> g = 0
         :: else ->
            check_overwritten(SLOT(g));
            word[SLOT(g)] = BUSYW(g, id); row[SLOT(g)] = me * 4 + n;
#if SPAN
            prev_key1[SLOT(g)] = last1;
            flags[SLOT(g)] = (IS_FIRST(me * 4 + n) -> FIRST : 0) | (IS_END(me * 4 + n) -> END : 0)
#endif
         fi
       };
#ifdef STOPS
       if :: me == 1 && g -> rest(STOPPED, over) :: true fi;
#endif
       if
       :: g -> atomic { word[SLOT(g)] = DONE(g, id); written[me * 4 + n] = 1; last1 = SPAN * g; n++; g = 0; fresh = 1 }
       :: else
       fi
    :: n < rows && head < MAXT && head >= ticket_limit -> rest(ROOM, head < ticket_limit || over); if :: over -> break :: else fi
    od;
    if
    :: true
    :: STAY && !over -> rest(OVER, over)
    fi;
    atomic { joined[id] = 0; holder[id] = 0 }
  } unless {
    atomic {
      KILLED(me) ->
      if :: id && holder[id] == me -> holder[id] = 0 :: else fi;
      if :: mutex == me -> mutex = 0; owner_died = 1 :: else fi;
      if :: sleeps[me] -> sleeps[me] = 0; quiet-- :: else fi;
      gone = gone | 1 << me;
      g = 0; n = 0; last1 = 0; polls = 0;
      forget()
    }
  };
  quiet++
}

inline find_oldest() {
  d_step {
    i = NO; k = 0;
    do
    :: k < CAP ->
       if :: leaf[k] && !(n > 0 && batch[0] == at[k]) && (i == NO || at[k] < at[i]) -> i = k :: else fi;
       k++
    :: else -> break
    od;
    k = 0
  }
}

/* Those held first, then their leaves. */
inline take() {
  ONE_STEP {
    dirty = TREE;
    find_oldest();
    do
    :: n < BATCH && i != NO ->
       d_step {
         w = row[i];
         MUST(nobody_else_has_it, !owner[w] || GONE(owner[w]));
         MUST(not_handed_out_again, commits[w] < MAXDRAWS);
         owner[w] = me;
         claim[i] = (claim[i] & 31) | PRESENCE(me) << 5;
         batch[n] = at[i]; what[n] = w;
         n++; w = 0
       };
       find_oldest()
    :: else -> break
    od;
    k = 0;
    do
    :: k < n -> leaf[SLOT(batch[k])] = 0; k++
    :: else -> break
    od;
    k = 0; i = 0;
    dirty = CLEAN
  }
}

/* No lock: words before and after. Whoever writes the row meanwhile has made it busy, or another one. */
inline copy_row(slot, key1, content) {
  d_step { MUST(copy_is_the_item, LIVE(word[slot]) && KEY1(word[slot]) == key1 && row[slot] == content) };
  d_step { MUST(copy_is_the_item, LIVE(word[slot]) && KEY1(word[slot]) == key1 && row[slot] == content) }
}

inline copy() {
  do
  :: k < n ->
     copy_row(SLOT(batch[k]), batch[k], what[k]);
#if SPAN
     d_step { i = next[SLOT(batch[k])]; MUST(copy_is_the_item, i != NO && !IS_FIRST(what[k] + 1)); w = KEY1(word[i]) };
     copy_row(i, w, what[k] + 1);
#endif
     atomic { k++; i = 0; w = 0 }
  :: else -> break
  od;
  k = 0
}

/* Done with the batch, or not: with all of it, or, if it dies, with none. */
inline let_go(draws) {
  ONE_STEP {
    dirty = TREE;
    if
    :: draws ->
       d_step {
         if
         :: n == 2 -> pair[0] = what[0]; pair[1] = what[n - 1]; had[0] = commits[what[0]]; had[1] = commits[what[n - 1]]
         :: else
         fi
       };
#ifdef ENDFIRST
       ender = PRESENCE(me);
#endif
#ifndef HALFCOMMIT
       do :: k < n -> ending[SLOT(batch[k])] = 1; k++ :: else -> break od;
       k = 0;
       ender = PRESENCE(me)
#endif
    :: else
    fi;
    do
    :: k < n ->
       i = SLOT(batch[k]);
       d_step { MUST(what_is_held_stays, at[i] == batch[k] && HOLDER(claim[i]) == PRESENCE(me)) };
#ifdef TWOSTORES
       d_step { claim[i] = claim[i] & 31; ending[i] = 0 };
       if :: DRAWS(claim[i]) + draws < MAXDRAWS -> leaf[i] = 1 :: else fi;
       d_step { claim[i] = claim[i] + draws; commits[what[k]] = commits[what[k]] + draws; owner[what[k]] = 0 };
#else
       if :: DRAWS(claim[i]) + draws < MAXDRAWS -> leaf[i] = 1 :: else fi;
       d_step {
         claim[i] = (claim[i] & 31) + draws; ending[i] = 0;
         commits[what[k]] = commits[what[k]] + draws; owner[what[k]] = 0
       };
#endif
       atomic { batch[k] = 0; what[k] = 0; k++; i = 0 }
    :: else -> break
    od;
    atomic { k = 0; n = 0; pair[0] = 0; pair[1] = 0; had[0] = 0; had[1] = 0 };
    ender = 0;
    dirty = CLEAN
  }
}

#define ANY_LEAF  (leaf[0] || leaf[1] || leaf[CAP / 2] || leaf[CAP - 1])

proctype Learner(byte me) {
  ABSORBER;
  byte n, batch[BATCH], what[BATCH], polls = POLLS, g, id;
  {
    do
    :: lock(me);
       if
       :: n > 0 ->
          if
          :: let_go(1)
          :: releases > 0 -> releases--; let_go(0)
          fi
       :: else
       fi;
       absorb();
       ONE_STEP {
#ifdef LAZY
         if :: give_back() :: true fi;
#else
         give_back();
#endif
         take()
       };
       advance();
       d_step { mutex = 0; forget() };
       if
       :: n > 0 -> copy()
       :: n == 0 && polls > 0 ->
          polls--;
#ifdef WKILL
          census(me)
#endif
       :: n == 0 && over -> break
       :: n == 0 && !over -> rest(ITEMS, ANY_LEAF || fresh || over); if :: over -> break :: else fi
       fi
    od
  } unless {
    atomic {
      KILLED(me) ->
      if :: mutex == me -> mutex = 0; owner_died = 1 :: else fi;
      if :: sleeps[me] -> sleeps[me] = 0; quiet-- :: else fi;
      id = 1;
      do :: id <= IDS -> if :: holder[id] == me -> holder[id] = 0 :: else fi; id++ :: else -> break od;
      gone = gone | 1 << me;
      id = 0; g = 0; polls = 0; n = 0; batch[0] = 0; batch[BATCH - 1] = 0; what[0] = 0; what[BATCH - 1] = 0;
      forget()
    }
  };
  quiet++
}

#define LEARNS(who)   (!GONE(who) && (who) < 4 + LEARNERS)
#define WAITS(who)    (sleeps[who] == ROOM && !GONE(who))

inline final_verdicts() {
  i = 0;
  do
  :: i < CAP ->
#ifdef STOPS
     MUST(no_slot_stays_busy, !BUSY(word[i]) || (sleeps[1] == STOPPED && !GONE(1)));
#else
     MUST(no_slot_stays_busy, !BUSY(word[i]));
#endif
     MUST(nothing_is_held, !HOLDER(claim[i]));
     i++
  :: else -> break
  od;
  k = 4;
  do
  :: k < 16 ->
     if
     :: written[k] && (!SPAN || (!IS_END(k) && NUMBER(k) < 3 && written[k + 1] && !IS_FIRST(k + 1))) ->
        c = 0;                                           /* does it wait for a learner? */
        i = 0;
        do :: i < CAP -> c = c || (at[i] && row[i] == k && leaf[i]); i++ :: else -> break od;
        MUST(every_item_is_delivered, commits[k] == MAXDRAWS || (c && !LEARNS(4) && !LEARNS(5)))
     :: else
     fi;
     k++
  :: else -> break
  od;
  /* Only who is there keeps a row: the last one of its stream. */
  if
  :: LEARNS(4) || LEARNS(5) ->
     MUST(writers_go_on, head >= MAXT || !(WAITS(1) || WAITS(2) || WAITS(3)));
     i = needed_from % CAP;
     MUST(no_room_is_lost, needed_from == absorbed || BUSY(word[i])
          || (SPAN && STANDS(i) == needed_from + 1 && holder[WROTE(claim[i])] == WRITER(row[i]) && !IS_END(row[i]) && !written[row[i] + 1]))
  :: else -> MUST(writers_go_on, ANY_LEAF || head >= MAXT || !(WAITS(1) || WAITS(2) || WAITS(3)))
  fi;
  c = 0; i = 0; k = 0
}

/* When all sleep or are through: time passes, and somebody looks. Nobody has a ticket then, unless he is dead. */
proctype Judge(byte others) {
  ABSORBER;
  byte me = JUDGE, g, id;
  do
  :: over -> break
  :: atomic {
     !over && quiet == others ->
     census(JUDGE);
     lock(JUDGE);
     absorb();
     give_back();
     advance();
     d_step {
       if
       :: (!((LEARNS(4) || LEARNS(5)) && (ANY_LEAF || fresh))
          && !((WAITS(1) || WAITS(2) || WAITS(3)) && head < ticket_limit)
          && !(sleeps[3] == AN_ID && (!holder[1] || !holder[2]))) -> final_verdicts(); over = 1
       :: else
       fi
     };
     mutex = 0; forget()
     }
  od
}

init {
  atomic {
#if SPAN
    d_step { byte s = 0; do :: s < CAP -> prev[s] = NO; next[s] = NO; s++ :: else -> break od; s = 0 };
#endif
    run Judge((ROWS1 > 0) + (ROWS2 > 0) + (ROWS3 > 0) + LEARNERS);
    if :: ROWS1 > 0 -> holder[1] = 1; joined[1] = 1; run Writer(1, 1, ROWS1) :: else fi;
    if :: ROWS2 > 0 -> holder[2] = 2; joined[2] = 1; run Writer(2, 2, ROWS2) :: else fi;
    if :: ROWS3 > 0 -> run Writer(3, 0, ROWS3) :: else fi;
    run Learner(4);
    if :: LEARNERS > 1 -> run Learner(5) :: else fi
  };
#ifdef K
  killed = 1 << K;
#endif
#ifdef K2
  killed = killed | 1 << K2
#endif
}
