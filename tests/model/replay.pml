/* The protocol of the shared memory (docs/design.md; cpp/write/ring_writer.h, absorber.h, streams.h, recovery.h, participants.h, item_rows.h,
 * batch_sampler.h, row_rewriter.h): writers, learners that absorb, draw, copy and feed back, a rewriter of rows, deaths at any
 * step, and a judge once all is quiet.
 * README.md says what is left out, and configurations.py how it is run.
 *
 * A row's content names it: writer * 8 + number, so what a learner copied can be told without trusting any header.
 *
 *   CAP MAXT        slots; tickets issued before writers stop
 *   SPAN HISTORY    steps after an item's anchor; frames before it
 *   ROWS1..3        rows of each writer. FIRSTS1..3, ENDS1..3: bit n is set where row n starts, or ends, an episode
 *   ROUNDS ROUNDS2  draws of the first learner; of the second, if there is one
 *   REWRITES        rows that the rewriter gives other values; DISCARDS: items that it discards. STAMPS: different marks there are
 *   WKILL           writers may be killed between any two steps. Writer 3 takes the first id that becomes free
 *   LKILL           learners and the rewriter may be killed between any two stores
 *   K K2            who is killed, at any moment (writers 1-3, learners 4 and 5, rewriter 7); K2 after K
 * and every naive variant is a flag by itself.
 */
#define NO     255
#define IDS    2
#define JUDGE  6
#define REWRITER 7
#define CLEAN  0
#define TREE   1
#define LINKS  2
#define VALUES 3
#define FIRST  1
#define END    2
#define DISCARDED 4
#define STAMP0 3                                         /* ids from here on say which rewrite a row had last */

#define SLOT(key1)       (((key1) - 1) % CAP)
#define BUSYW(key1, id)  ((key1) << 4 | (id) << 1 | 1)
#define DONE(key1, id)   ((key1) << 4 | (id) << 1)
#define VOID(key1)       ((key1) << 4)
#define BUSY(w)          ((w) & 1)
#define ID(w)            ((w) >> 1 & 7)
#define LIVE(w)          (!BUSY(w) && ID(w))
#define KEY1(w)          ((w) >> 4)                      /* key + 1; 0: never written */
#define NEWEST1(s, h)    ((s) < (h) -> (h) - ((h) - 1 - (s)) % CAP : 0)

/* The writers' scripts, by content. */
#define NUMBER(c)     ((c) % 8)
#define IS_FIRST(c)   (((c) / 8 == 1 -> FIRSTS1 : ((c) / 8 == 2 -> FIRSTS2 : FIRSTS3)) >> NUMBER(c) & 1)
#define IS_END(c)     (((c) / 8 == 1 -> ENDS1 : ((c) / 8 == 2 -> ENDS2 : ENDS3)) >> NUMBER(c) & 1)

/* What is under the mutex alone is one step, unless its holder may be killed in between. */
#ifdef LKILL
#define ONE_STEP
#else
#define ONE_STEP atomic
#endif

/* A verdict has a name: it is what the verifier prints. */
#define MUST(verdict, condition) verdict = (condition); assert(verdict)
hidden byte copy_is_whole, copy_is_the_row_drawn, copy_follows_the_stream, copy_has_every_row;
hidden byte failed_draw_is_gone, item_completes_once, no_slot_stays_busy, every_row_is_absorbed, sums_follow_leaves;
hidden byte drawable_is_complete, complete_is_drawable, priority_is_its_own, links_agree, pending_is_a_lost_ticket;
hidden byte row_is_old_or_new, rewrite_stays, batch_has_one_version, discarded_is_not_drawn;

/* The ring. */
byte head;
byte word[CAP], prev_key1[CAP], flags[CAP], step[CAP];
byte half0[CAP], half1[CAP];                             /* the payload: a torn copy has two contents */

/* Those who take part: byte locks (0: free), and the ticket in flight (key + 1). */
byte holder[IDS + 1], in_flight[IDS + 1];
bit joined[IDS + 1];

/* Under the mutex. A leaf holds the key + 1 of the item whose priority it is. */
byte mutex, absorbed, dirty, drawable;
byte at[CAP], prev[CAP], next[CAP], leaf[CAP];
bit pending[CAP], owner_died;

/* Rewriting: a row's other values, how many holds of the lock changed rows, and the record of the change under way. */
#if REWRITES || DISCARDS
#define REWRITING
#define REWRITERS 1
#else
#define REWRITERS 0
#endif
#ifdef REWRITING
byte value0[CAP], value1[CAP], rewrites, record_key1, record_value;
bit record_discards;
byte told[MAXT + 1];                                     /* a ghost: the value that a rewrite has promised */
bit refused[MAXT + 1];                                   /* a ghost: the discard has been promised */
#endif

/* Ghosts: nothing but verdicts and the end depends on them. */
byte killed, finished, content[MAXT + 1];
bit repaired, was_complete[MAXT + 1];

#define KILLED(who)  (killed >> (who) & 1)

/* ---- Under the mutex: variables of whoever holds it ---- */

#define ABSORBER \
  byte H, c, i, newest1, w, b, k, r_prev1, r_flags, r_step, p, held, sum; \
  byte path[SPAN + HISTORY + 1]; \
  bit wait, adopted, deferred, ok

inline forget() {
  atomic { H = 0; c = 0; i = 0; newest1 = 0; w = 0; b = 0; k = 0; r_prev1 = 0; r_flags = 0; r_step = 0; p = 0; held = 0;
           wait = 0; adopted = 0; deferred = 0; ok = 0 }
}

/* leaf_changes.h: leaves at once, the sum with the next flush. */
inline set_leaf(slot, value) {
  d_step { sum = sum + (value != 0) - (leaf[slot] != 0); leaf[slot] = value }
}
inline flush() { d_step { drawable = drawable + sum; sum = 0 } }

/* streams.h */
#ifdef CROSSLINK
#define FOLLOWS (r_prev1 != 0)
#else
#define FOLLOWS (r_prev1 != 0 && !(r_flags & FIRST))
#endif

inline link(before, slot) {
  if
  :: next[before] == NO -> prev[slot] = before; next[before] = slot
  :: else
  fi
}

inline unlink(slot) {
  if :: prev[slot] != NO -> next[prev[slot]] = NO :: else fi;
  if :: next[slot] != NO -> prev[next[slot]] = NO :: else fi;
  prev[slot] = NO;
  next[slot] = NO
}

/* Which of the rows before `slot` are anchors of items that it completes: path[k - 1] for k from `k` to `held`. */
inline find_completed(slot) {
  d_step {
    b = slot; p = 0;
    do
    :: p < SPAN + HISTORY && prev[b] != NO -> b = prev[b]; path[p] = b; p++
    :: else -> break
    od;
    held = p;
#ifdef NOEND
    k = SPAN;
#else
    k = (r_flags & END -> 1 : SPAN);
#endif
    if :: !(r_flags & END) && r_step < SPAN -> k = NO :: else fi;
    p = 0; b = 0
  }
}
#ifdef FRAMELESS
#define FRAMES_HELD 1
#else
#define FRAMES_HELD (held >= k + (r_step - k < HISTORY && r_step >= k -> r_step - k : HISTORY))
#endif

/* absorber.h */
inline evict(slot) {
  set_leaf(slot, 0);
#ifndef OWNLEAF
  b = slot; k = 0;
#ifdef ROWPREV
  do
  :: k < SPAN && prev_key1[b] != 0 -> b = SLOT(prev_key1[b]); set_leaf(b, 0); k++
  :: else -> break
  od;
#else
  do
  :: k < SPAN && prev[b] != NO -> b = prev[b]; set_leaf(b, 0); k++
  :: else -> break
  od;
#endif
#ifndef STACKLEAF
  b = slot; k = 0;
  do
  :: k < HISTORY && next[b] != NO -> b = next[b]; set_leaf(b, 0); k++
  :: else -> break
  od;
#endif
#endif
  b = 0; k = 0;
  unlink(slot);
  at[slot] = 0
}

/* Which items nobody is to draw any more. */
#if DISCARDS && !defined(LEAFONLY)
#define IS_DISCARDED(slot) (flags[slot] & DISCARDED)
#else
#define IS_DISCARDED(slot) 0
#endif

inline complete(anchor) {
  if :: IS_DISCARDED(anchor) :: else -> complete_item(anchor) fi
}

inline complete_item(anchor) {
  d_step {
#if !defined(LKILL) && !defined(EARLYRECLAIM)
    MUST(item_completes_once, !was_complete[at[anchor]]);
    was_complete[at[anchor]] = 1;
#endif
    sum = sum + (leaf[anchor] == 0);
    leaf[anchor] = at[anchor]
  }
}

inline adopt(slot) {
  at[slot] = KEY1(w);
  adopted = 1;
  if :: b != NO -> link(b, slot) :: else fi;
  find_completed(slot);
  do
  :: k <= SPAN && k <= held -> if :: FRAMES_HELD -> complete(path[k - 1]) :: else fi; k++
  :: else -> break
  od;
  k = 0; held = 0
}

#ifdef TICKETJUMP
#define MAY_ADOPT (KEY1(w) == newest1)
#else
#define MAY_ADOPT 1
#endif

/* Slot i against its newest ticket. */
inline sync() {
  ONE_STEP {
    w = word[i];
#ifdef EARLYRECLAIM
    if :: BUSY(w) -> atomic { word[i] = VOID(KEY1(w)); w = word[i] } :: else fi;
#endif
    if :: at[i] && (BUSY(w) || KEY1(w) != at[i]) -> evict(i) :: else fi;
    wait = BUSY(w) || KEY1(w) < newest1;
  }
  if
  :: !at[i] && LIVE(w) && MAY_ADOPT ->
     atomic { r_prev1 = prev_key1[i]; r_flags = flags[i]; r_step = step[i]; ok = word[i] == w; b = NO };
     ONE_STEP {
       if
       :: !ok -> wait = 1
       :: ok && FOLLOWS ->
          d_step {
            p = word[SLOT(r_prev1)];
            ok = 1;
            if
            :: !LIVE(p) || KEY1(p) != r_prev1
            :: else ->
               b = SLOT(r_prev1);
               if
#ifdef NODEFER
               :: at[b] != r_prev1 -> b = NO
#else
               :: at[b] != r_prev1 -> ok = 0; wait = 1; deferred = 1
#endif
               :: else
               fi
            fi;
            p = 0
          };
          if :: ok -> adopt(i) :: else fi
       :: else -> adopt(i)
       fi;
       pending[i] = wait
     }
  :: else -> pending[i] = wait
  fi;
  atomic { w = 0; b = 0; wait = 0; ok = 0; r_prev1 = 0; r_flags = 0; r_step = 0 }
}

inline absorb() {
  ONE_STEP {
    H = head;
    d_step { i = 0; do :: i < CAP && !pending[i] -> i++ :: else -> break od };
    if
    :: absorbed < H || i < CAP -> dirty = LINKS; c = (H > CAP && H - CAP > absorbed -> H - CAP : absorbed)
    :: else -> c = NO
    fi
  };
  if
  :: c != NO ->
     do
     :: c < H ->
        i = c % CAP; newest1 = c + 1;
#ifdef WAIT
        if :: BUSY(word[i]) || KEY1(word[i]) < newest1 -> H = c; break :: else fi;
#endif
        sync();
        c++
     :: else -> break
     od;
     ONE_STEP { flush(); absorbed = H; adopted = 0; deferred = 0; i = 0 };
#ifndef SKIP
     do
     :: d_step { i < CAP && !pending[i] -> i++ }
     :: i < CAP && pending[i] -> newest1 = NEWEST1(i, H); sync(); i++
     :: i == CAP && adopted && deferred -> adopted = 0; deferred = 0; i = 0
     :: i == CAP && !(adopted && deferred) -> break
     od;
#endif
     ONE_STEP { flush(); dirty = CLEAN }
  :: else
  fi;
  forget()
}

/* What a failed draw does with every slot that it found. */
inline resync(slot) {
  ONE_STEP { dirty = LINKS; i = slot; newest1 = NEWEST1(i, H) };
  sync();
  ONE_STEP { flush(); dirty = CLEAN }
}

/* ---- recovery.h ---- */

inline facts_of(slot) {
  w = word[slot];
  atomic { r_prev1 = prev_key1[slot]; r_flags = flags[slot]; r_step = step[slot];
           ok = at[slot] && LIVE(w) && KEY1(w) == at[slot] && word[slot] == w; w = 0 }
}

inline read_slots() {
  i = 0;
  do
  :: i < CAP ->
     w = word[i];
     ok = LIVE(w) && word[i] == w;
     k = (ok -> KEY1(w) : 0);
#ifdef ATFIRST
     if :: at[i] != k -> at[i] = k; leaf[i] = 0 :: else fi;
#else
     if :: at[i] != k -> leaf[i] = 0; at[i] = k :: else fi;
#endif
#ifndef RECNOPEND
     pending[i] = BUSY(w) || (LIVE(w) && !ok) || KEY1(w) < NEWEST1(i, H);
#endif
     atomic { k = 0; w = 0; ok = 0; i++ }
  :: else -> break
  od
}

inline defer_rows() {
  do
  :: deferred = 0; i = 0;
     do
     :: i < CAP ->
        facts_of(i);
        if :: ok && FOLLOWS -> w = word[SLOT(r_prev1)]; ok = LIVE(w) && KEY1(w) == r_prev1 && at[SLOT(r_prev1)] != r_prev1
           :: else -> ok = 0 fi;
        if :: ok -> leaf[i] = 0; at[i] = 0; pending[i] = 1; deferred = 1 :: else fi;
        atomic { w = 0; ok = 0; i++ }
     :: else -> break
     od;
     if :: !deferred -> break :: else fi
  od
}

inline relink() {
  i = 0;
  do :: i < CAP -> prev[i] = NO; next[i] = NO; i++ :: else -> break od;
  i = 0;
  do
  :: i < CAP ->
     facts_of(i);
     if :: ok && FOLLOWS && at[SLOT(r_prev1)] == r_prev1 -> b = SLOT(r_prev1); link(b, i) :: else fi;
     atomic { b = 0; ok = 0; i++ }
  :: else -> break
  od
}

inline settle_leaves() {
  i = 0; c = 0;                                          /* c: a bit for every slot whose item is complete */
  do
  :: i < CAP ->
     facts_of(i);
     if
     :: ok ->
        find_completed(i);
        do
        :: k <= SPAN && k <= held ->
           if
           :: FRAMES_HELD && !IS_DISCARDED(path[k - 1]) ->
              d_step { b = path[k - 1]; c = c | 1 << b; if :: !leaf[b] -> leaf[b] = at[b] :: else fi }
           :: else
           fi;
           k++
        :: else -> break
        od
     :: else
     fi;
     atomic { b = 0; k = 0; held = 0; ok = 0; i++ }
  :: else -> break
  od;
  i = 0;
  do
  :: i < CAP -> d_step { if :: !(c >> i & 1) -> leaf[i] = 0 :: else fi; i++ }
  :: else -> break
  od
}

inline count_leaves(count) {
  d_step { count = 0; i = 0; do :: i < CAP -> count = count + (leaf[i] != 0); i++ :: else -> break od }
}

#ifdef REWRITING
/* Which mark the rows have that the n-th hold of the lock rewrote, and whether a row has one of those since the draw began. */
#define STAMP(n)   (STAMP0 + (n) % STAMPS)
#define HOLDS      ((rewrites + 1) / 2 - since / 2)
#define TOUCHED(w) (ID(w) >= STAMP0 && (HOLDS >= STAMPS || (ID(w) - STAMP0 + STAMPS - (since / 2 + 1) % STAMPS) % STAMPS < HOLDS))
#endif

/* row_rewriter.h: what the record says is done, once the row's word says that it is to be. */
#ifdef REWRITING
#ifdef NOBUSY
#define MAY_CHANGE(w) (LIVE(w) && KEY1(w) == record_key1)
#else
#define MAY_CHANGE(w) (BUSY(w) && KEY1(w) == record_key1 && ID(w) >= STAMP0)
#endif
#ifdef NOSTAMP
#define STAMP_NOW STAMP0
#else
#define STAMP_NOW STAMP((rewrites + 1) / 2)
#endif

inline apply_record() {
  if
  :: record_key1 ->
     b = SLOT(record_key1);
     w = word[b];
     if
     :: MAY_CHANGE(w) ->
#ifdef NORECORD
        if :: owner_died -> skip :: else -> value0[b] = record_value; value1[b] = record_value fi;
#else
        value0[b] = record_value;
        value1[b] = record_value;
#endif
        if :: record_discards -> flags[b] = flags[b] | DISCARDED :: else fi;
        atomic {
          if
          :: word[b] == w -> word[b] = DONE(record_key1, STAMP_NOW); told[record_key1] = record_value;
             refused[record_key1] = refused[record_key1] | record_discards
          :: else
          fi;
          w = 0
        }
     :: else
     fi;
     if
     :: record_discards && at[b] == record_key1 && refused[record_key1] -> set_leaf(b, 0)
     :: else
     fi;
     record_key1 = 0;
     atomic { record_value = 0; record_discards = 0; w = 0; b = 0 }
  :: else
  fi
}

/* Gives the row with key1 in slot s `value`, or discards the item that it is the anchor of. The lock is held. */
inline rewrite(value, discards) {
  ONE_STEP {
    dirty = VALUES;
    rewrites++;                                          /* odd while rows may change */
    record_value = (discards -> told[key1] : value); record_discards = discards;
    record_key1 = key1
  };
#ifndef NOBUSY
  atomic { if :: LIVE(word[s]) && KEY1(word[s]) == key1 -> word[s] = BUSYW(key1, STAMP_NOW) :: else fi };
#endif
  apply_record();
  ONE_STEP { flush(); rewrites++; dirty = CLEAN }
}
#endif

inline recover() {
  sum = 0;
#ifdef REWRITING
  apply_record();
  if :: rewrites & 1 -> rewrites++ :: else fi;
#endif
#ifndef RECLEAF
  if
  :: dirty == LINKS ->
     H = head;
     read_slots();
#ifndef RECNODEFER
     defer_rows();
#endif
     relink();
#ifdef RECCLEAN
     dirty = CLEAN;
#endif
     settle_leaves();
     absorbed = H
  :: else
  fi;
#endif
  count_leaves(drawable);
  dirty = CLEAN;
  repaired = 1;
  forget();
  owner_died = 0
}

inline lock(me) {
  atomic { mutex == 0 -> mutex = me };
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
  in_flight[id] = 0
}

inline census(me) {
  id = 1;
  do
  :: id <= IDS ->
     if
     :: atomic { joined[id] && !holder[id] -> holder[id] = me };
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

proctype Writer(byte me; byte id; byte rows) {
  byte g, w, n, last1, episode_step;
  {
#ifdef WKILL
    if
    :: !id ->                                            /* all ids are taken: waits for one */
       if
       :: atomic { !holder[1] -> holder[1] = me; id = 1 }
       :: atomic { holder[1] && !holder[2] -> holder[2] = me; id = 2 }
       fi;
#ifndef NORECLAIM
       reclaim(id);
#endif
       joined[id] = 1
    :: else
    fi;
#endif
    do
    :: n < rows ->
       atomic { if :: head < MAXT -> head++; g = head :: else -> break fi };
#ifdef WKILL
       in_flight[id] = g;
#endif
       /* Load and CAS in one step: a CAS that fails is a hole, too. */
       atomic {
         w = word[SLOT(g)];
         if
         :: BUSY(w) || KEY1(w) >= g -> g = 0
         :: else -> word[SLOT(g)] = BUSYW(g, id); content[g] = me * 8 + n
         fi;
         w = 0
       };
       if
       :: g ->
          atomic {
            episode_step = (IS_FIRST(me * 8 + n) -> 0 : episode_step + 1);
            prev_key1[SLOT(g)] = last1; step[SLOT(g)] = episode_step;
            flags[SLOT(g)] = (IS_FIRST(me * 8 + n) -> FIRST : 0) | (IS_END(me * 8 + n) -> END : 0);
            half0[SLOT(g)] = me * 8 + n
#ifdef REWRITING
            ; value0[SLOT(g)] = 0
#endif
          };
#ifdef REWRITING
          value1[SLOT(g)] = 0;
#endif
          half1[SLOT(g)] = me * 8 + n;
          atomic { word[SLOT(g)] = DONE(g, id); last1 = g; n++; g = 0 }
       :: else
       fi
    :: else -> break
    od;
    atomic { joined[id] = 0; holder[id] = 0 }
  } unless {
    atomic {
      KILLED(me) ->
      if :: id && holder[id] == me -> holder[id] = 0 :: else fi;
      g = 0; w = 0; n = 0; last1 = 0; episode_step = 0
    }
  };
  finished++
}

/* I1, I2 and I5 of the protocol, under the mutex, by the scripts alone. */
inline check_invariants() {
#ifndef EARLYRECLAIM                                     /* breaks everything: the torn copy is what to see */
  d_step {
    count_leaves(k);
    MUST(sums_follow_leaves, k == drawable);
    i = 0;
    do
    :: i < CAP ->
       if
       :: next[i] != NO ->
          b = content[at[i]] + 1;
          MUST(links_agree, prev[next[i]] == i && at[i] && at[next[i]] && content[at[next[i]]] == b && !IS_FIRST(b))
       :: else
       fi;
       if
       :: leaf[i] ->
#if DISCARDS
          MUST(discarded_is_not_drawn, !refused[at[i]]);
#endif
          MUST(priority_is_its_own, leaf[i] == at[i]);
          MUST(drawable_is_complete, !HISTORY || IS_FIRST(content[at[i]]) || prev[i] != NO);
          b = i; k = 0;
          do
          :: k < SPAN && !(k && IS_END(content[at[b]])) ->
             MUST(drawable_is_complete, next[b] != NO);
             b = next[b]; k++
          :: else -> break
          od
       :: else
       fi;
       i++
    :: else -> break
    od;
    i = 0; k = 0; b = 0
  }
#else
  skip
#endif
}

/* item_rows.h: read one row's header in two steps, its word before and after. A row is immutable while its word stands, so
 * the second look at the word may as well be at the same moment as the header's. */
inline look_at(slot, position) {
  found[position] = slot;
  seen[position] = word[slot]
}
inline read_header(slot, position) {
  atomic {
    r_prev1 = prev_key1[slot]; r_flags = flags[slot]; r_step = step[slot];
    ok = ok && word[slot] == seen[position]
  }
}

/* Positions: HISTORY is the anchor, those before it frames, those after it steps. */
inline find_rows() {
  hint[0] = s; k = 0;
  do
  :: k < SPAN -> atomic { hint[k + 1] = (hint[k] == NO -> NO : next[hint[k]]); k++ }
  :: else -> break
  od;
  atomic {
    k = HISTORY; lo = HISTORY; hi = HISTORY;
    look_at(s, HISTORY);
#ifdef ANYKEY
    ok = LIVE(seen[HISTORY])
#else
    ok = LIVE(seen[HISTORY]) && KEY1(seen[HISTORY]) == key1
#endif
  };
  read_header(s, HISTORY);
  w = r_flags;
  newest1 = r_step;                                      /* of the anchor: how many frames its episode has before it */
  do
  :: ok && lo > 0 && newest1 > 0 ->
     atomic {
       b = r_prev1; newest1--;
       if
       :: b == 0 -> ok = 0
       :: else -> look_at(SLOT(b), lo - 1); ok = LIVE(seen[lo - 1]) && KEY1(seen[lo - 1]) == b
       fi
     };
     if :: ok -> read_header(SLOT(b), lo - 1) :: else fi;
     if :: ok -> lo-- :: else fi
  :: else -> break
  od;
  atomic { r_flags = 0; b = 0; w = 0; newest1 = 0; k = 0 };
  do
  :: ok && k < SPAN && !(k && r_flags & END) ->
     atomic {
       k++;
       if
       :: hint[k] == NO -> ok = 0
       :: else -> look_at(hint[k], HISTORY + k); ok = LIVE(seen[HISTORY + k])
       fi
     };
     if
     :: ok ->
        read_header(hint[k], HISTORY + k);
#ifndef TRUSTNEXT
        ok = ok && r_prev1 == KEY1(seen[HISTORY + k - 1]) && !(r_flags & FIRST);
#endif
        if :: ok -> hi++ :: else fi
     :: else
     fi
  :: else -> break
  od
}

#ifdef REWRITING
#define COPY_VALUE(k)  value[k] = value0[found[k]]
#define VALUE_TORN(k)  (value1[found[k]] != value[k])
#else
#define COPY_VALUE(k)  skip
#define VALUE_TORN(k)  0
#endif

inline copy_rows() {
  d_step { k = lo; do :: k <= hi -> copied[k] = half0[found[k]]; COPY_VALUE(k); k++ :: else -> break od };
  d_step {
    k = lo;
    do :: k <= hi -> torn = torn || half1[found[k]] != copied[k] || VALUE_TORN(k); k++ :: else -> break od
  };
  d_step { k = lo; do :: k <= hi -> ok = ok && word[found[k]] == seen[k]; k++ :: else -> break od; k = 0 }
}

inline check_copy() {
  d_step {
    MUST(copy_is_whole, !torn);
    MUST(copy_is_the_row_drawn, copied[HISTORY] == content[key1]);
    k = lo;
    do
    :: k < hi -> MUST(copy_follows_the_stream, copied[k + 1] == copied[k] + 1 && !IS_FIRST(copied[k + 1])); k++
    :: else -> break
    od;
    MUST(copy_has_every_row, (hi == HISTORY + SPAN || (hi > HISTORY && IS_END(copied[hi])))
                             && (lo == 0 || IS_FIRST(copied[lo])));
    k = 0
  }
}

#ifdef REWRITING
inline keep_values() {
  d_step { k = lo; do :: k <= hi -> kept[k] = value[k]; k++ :: else -> break od; k = 0 }
}

/* The batch has the item twice. What was rewritten meanwhile is copied again, both times, under the lock. Nobody
 * rewrites then. */
inline copy_twice() {
  since = rewrites;
  find_rows();
  if :: ok -> copy_rows() :: else fi;
  if
  :: ok -> keep_values(); find_rows(); if :: ok -> copy_rows() :: else fi
  :: else
  fi;
  if
#ifdef NOLOOK
  :: !ok ->
#else
  :: !ok || rewrites != since || since & 1 ->
#endif
     whole = ok;
     forget();
     lock(me);
     find_rows();
     skip;                                               /* SPIN lets no loop end where a d_step begins */
     d_step { k = lo; do :: ok && k <= hi -> whole = whole && !TOUCHED(seen[k]); k++ :: else -> break od; k = 0 };
     if :: ok && !whole -> torn = 0; copy_rows(); keep_values() :: else fi;
     mutex = 0
  :: else
  fi;
  since = 0; whole = 0;
  if
  :: ok -> d_step { k = lo; do :: k <= hi -> MUST(batch_has_one_version, kept[k] == value[k]); k++ :: else -> break od; k = 0 }
  :: else
  fi
}
#endif

inline forget_draw() {
  d_step {
#ifdef REWRITING
    k = 0;
    do :: k <= SPAN + HISTORY -> value[k] = 0; kept[k] = 0; k++ :: else -> break od;
#endif
    k = 0;
    do :: k <= SPAN + HISTORY -> found[k] = 0; seen[k] = 0; copied[k] = 0; k++ :: else -> break od;
    k = 0;
    do :: k <= SPAN -> hint[k] = 0; k++ :: else -> break od;
    k = 0; s = 0; key1 = 0; lo = 0; hi = 0; torn = 0
  }
}

proctype Learner(byte me; byte rounds) {
  ABSORBER;
  byte s, key1, lo, hi, g, id, found[SPAN + HISTORY + 1], seen[SPAN + HISTORY + 1], copied[SPAN + HISTORY + 1];
  byte hint[SPAN + 1];
#ifdef REWRITING
  byte value[SPAN + HISTORY + 1], kept[SPAN + HISTORY + 1], since;
  bit whole;
#endif
  bit torn;
  {
    lock(me);
    absorb();
    do
    :: rounds > 0 ->
       rounds--;
       atomic {                                          /* draw: any item with a leaf */
         check_invariants();
         k = drawable;
         do
         :: s < CAP && leaf[s] -> key1 = at[s]; break
         :: s < CAP && !(leaf[s] && k == 1) -> k = k - (leaf[s] != 0); s++
         :: s == CAP -> s = 0; break
         od;
         k = 0;
         mutex = 0
       };
       if
       :: key1 ->
#ifdef REWRITING
          copy_twice();
#else
          find_rows();
          if :: ok -> copy_rows() :: else fi;
#endif
          if
          :: ok ->
             check_copy();
             forget();
             lock(me);
             absorb();
             ONE_STEP {                                  /* priority_updater.h: the TD error, to this item or to none */
#ifdef UPDRES
               if :: LIVE(word[s]) && KEY1(word[s]) == key1 -> set_leaf(s, key1); flush() :: else fi
#else
               if :: at[s] == key1 && leaf[s] -> dirty = TREE; drawable--; leaf[s] = key1; drawable++; dirty = CLEAN
                  :: else fi
#endif
             };
             forget_draw()
          :: else ->
             forget();
             lock(me);
             H = head;
             resync(s);
             do :: lo <= hi -> if :: found[lo] != s -> resync(found[lo]) :: else fi; lo++ :: else -> break od;
             absorb();
             /* A repair takes all links away for a moment: what fails then may be drawn again. */
             d_step { MUST(failed_draw_is_gone, repaired || at[s] != key1 || !leaf[s]) };
             forget_draw()
          fi
       :: else ->
#ifdef WKILL
          census(me);
#endif
          lock(me);
          absorb()
       fi
    :: else -> break
    od;
    check_invariants();
    mutex = 0
  } unless {
    atomic {
      KILLED(me) ->
      if :: mutex == me -> mutex = 0; owner_died = 1 :: else fi;
      id = 1;
      do :: id <= IDS -> if :: holder[id] == me -> holder[id] = 0 :: else fi; id++ :: else -> break od;
      id = 0; g = 0; sum = 0; rounds = 0;
#ifdef REWRITING
      since = 0; whole = 0;
#endif
      forget();
      forget_draw()
    }
  };
  finished++
}

#ifdef REWRITING
proctype Rewriter(byte me; byte values; byte discards) {
  ABSORBER;
  byte s, key1;
  {
    do
    :: values + discards > 0 ->
       lock(me);
       absorb();
       atomic {                                          /* any row that is there */
         do
         :: s < CAP && LIVE(word[s]) -> key1 = KEY1(word[s]); break
         :: s < CAP -> s++
         :: s == CAP -> s = 0; break
         od
       };
       if
       :: key1 && values -> rewrite(values, 0)
       :: key1 && discards -> rewrite(0, 1)
       :: !key1
       fi;
       atomic { if :: values -> values-- :: else -> discards-- fi };
       atomic { s = 0; key1 = 0; forget() };
       mutex = 0
    :: else -> break
    od
  } unless {
    atomic {
      KILLED(me) ->
      if :: mutex == me -> mutex = 0; owner_died = 1 :: else fi;
      s = 0; key1 = 0; sum = 0; values = 0; discards = 0;
      forget()
    }
  };
  finished++
}
#endif

hidden byte present[32];

proctype Judge(byte others) {
  ABSORBER;
  byte g, id;
  bit want;
  finished == others;
  census(JUDGE);
  lock(JUDGE);
  absorb();
#ifdef EARLYRECLAIM
  goto quiet;
#endif
  check_invariants();
  d_step {
    i = 0;
    do :: i < 32 -> present[i] = 0; i++ :: else -> break od;
    i = 0;
    do
    :: i < CAP -> if :: LIVE(word[i]) -> present[half0[i]] = 1 :: else fi; i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < CAP ->
       w = word[i];
       MUST(no_slot_stays_busy, !BUSY(w));
       MUST(every_row_is_absorbed, at[i] == (LIVE(w) -> KEY1(w) : 0));
#ifdef REWRITING
       MUST(row_is_old_or_new, !LIVE(w) || value0[i] == value1[i]);
       MUST(rewrite_stays, !LIVE(w) || value0[i] == told[KEY1(w)]);
#endif
       MUST(pending_is_a_lost_ticket, pending[i] == (KEY1(w) < NEWEST1(i, head)));
       if
       :: LIVE(w) ->                                     /* I6: drawable if and only if every row is there */
          b = half0[i]; k = 0;
          want = !IS_END(b) && (!HISTORY || IS_FIRST(b) || present[b - 1]);
          do
          :: want && k < SPAN && !IS_END(b) -> b++; k++; want = present[b] && !IS_FIRST(b)
          :: else -> break
          od;
#if DISCARDS
          want = want && !refused[KEY1(w)]
#endif
       :: else -> want = 0
       fi;
       if
       :: want -> MUST(complete_is_drawable, leaf[i])
       :: else -> MUST(drawable_is_complete, !leaf[i])
       fi;
       i++
    :: else -> break
    od
  };
quiet:
  mutex = 0
}

init {
  atomic {
    d_step { byte s = 0; do :: s < CAP -> prev[s] = NO; next[s] = NO; s++ :: else -> break od; s = 0 };
#ifdef REWRITING
    run Rewriter(REWRITER, REWRITES, DISCARDS);
#endif
    run Judge((ROWS1 > 0) + (ROWS2 > 0) + (ROWS3 > 0) + (ROUNDS > 0) + (ROUNDS2 > 0) + REWRITERS);
    if :: ROWS1 > 0 -> holder[1] = 1; joined[1] = 1; run Writer(1, 1, ROWS1) :: else fi;
    if :: ROWS2 > 0 -> holder[2] = 2; joined[2] = 1; run Writer(2, 2, ROWS2) :: else fi;
    if :: ROWS3 > 0 -> run Writer(3, 0, ROWS3) :: else fi;
    if :: ROUNDS > 0 -> run Learner(4, ROUNDS) :: else fi;
    if :: ROUNDS2 > 0 -> run Learner(5, ROUNDS2) :: else fi
  };
#ifdef K
  killed = 1 << K;
#endif
#ifdef K2
  killed = killed | 1 << K2
#endif
}
